#include "syncnorm/process_group.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "support/world.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;
using torch::Tensor;

using Tensors = std::vector<Tensor>;

/// Sum of 1..size: what ranks add up to that bring rank + 1.
double triangle(int size) { return size * (size + 1) / 2.0; }

TEST(ProcessGroup, AllReducesWithEveryOperation) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  const double mine = world->rank() + 1;
  const double size = world->size();
  const std::vector<std::pair<c10d::ReduceOp::RedOpType, double>> expected = {
      {c10d::ReduceOp::SUM, triangle(world->size())},
      {c10d::ReduceOp::AVG, triangle(world->size()) / size},
      {c10d::ReduceOp::MAX, size},
      {c10d::ReduceOp::MIN, 1}};
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const auto& [op, value] : expected) {
      Tensors tensors{torch::full({3, 2}, mine, dtype)};
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      const auto work = group->allreduce(tensors, options);
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(work->isCompleted());
      EXPECT_TRUE(torch::equal(tensors[0], torch::full({3, 2}, value, dtype)))
          << op << ' ' << dtype;
    }
  }
  Tensors counts{torch::full({5}, world->rank() + 1, torch::kInt)};
  group->allreduce(counts)->wait();
  EXPECT_TRUE(
      torch::equal(counts[0], torch::full({5}, int64_t(triangle(world->size())), torch::kInt)));
}

TEST(ProcessGroup, CoalescedAllReduceKeepsDtypesApart) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  const double mine = world->rank() + 1;
  Tensors tensors{torch::full({2, 3}, mine, torch::kDouble), torch::full({4}, mine, torch::kInt),
                  torch::full({1}, mine, torch::kDouble), torch::full({0}, mine, torch::kFloat),
                  torch::full({3, 2}, mine, torch::kFloat).t()};
  // Not a double: it would be rounded on a detour through the tensors beside it.
  const int64_t odd = (int64_t{1} << 53) + 1;
  tensors.push_back(torch::full({2}, odd, torch::kLong));
  group->allreduce_coalesced(tensors)->wait();
  EXPECT_TRUE(torch::equal(tensors.back(), torch::full({2}, odd * world->size(), torch::kLong)));
  tensors.pop_back();
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(torch::equal(tensor, torch::full_like(tensor, triangle(world->size())))) << tensor;
  }
}

TEST(ProcessGroup, BroadcastsFromEveryRoot) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  for (int root = 0; root < world->size(); ++root) {
    Tensors tensors{torch::full({7}, world->rank(), torch::kLong)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    group->broadcast(tensors, options)->wait();
    EXPECT_TRUE(torch::equal(tensors[0], torch::full({7}, root, torch::kLong)));
  }
  Tensors tensors{torch::zeros({1})};
  c10d::BroadcastOptions options;
  options.rootRank = world->size();
  EXPECT_THROW(group->broadcast(tensors, options), c10::Error);
}

TEST(ProcessGroup, GathersEvenAndUnevenShards) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  const int size = world->size();
  auto even = torch::full({2, 3}, world->rank(), torch::kDouble);
  auto all = torch::empty({2 * size, 3}, torch::kDouble);
  group->_allgather_base(all, even)->wait();
  for (int r = 0; r < size; ++r) EXPECT_TRUE((all.narrow(0, 2 * r, 2) == r).all().item<bool>());

  std::vector<Tensors> outputs(1);
  for (int r = 0; r < size; ++r) outputs[0].push_back(torch::empty({r}, torch::kFloat));
  Tensors inputs{torch::full({world->rank()}, world->rank(), torch::kFloat)};
  group->allgather(outputs, inputs)->wait();
  for (int r = 0; r < size; ++r) {
    EXPECT_TRUE(torch::equal(outputs[0][r], torch::full({r}, r, torch::kFloat)));
  }
}

TEST(ProcessGroup, ReduceScattersEvenAndUnevenShards) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  const int size = world->size();
  const int rank = world->rank();
  auto whole = torch::arange(2 * size, torch::kDouble) * (rank + 1);
  auto part = torch::empty({2}, torch::kDouble);
  c10d::ReduceScatterOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  group->_reduce_scatter_base(part, whole, average)->wait();
  const auto rows = torch::arange(2 * size, torch::kDouble).narrow(0, 2 * rank, 2);
  EXPECT_TRUE(torch::equal(part, rows * (triangle(size) / size)));

  for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX}) {
    std::vector<Tensors> inputs(1);
    for (int r = 0; r < size; ++r) inputs[0].push_back(torch::full({r + 1}, rank + 1.0));
    Tensors outputs{torch::empty({rank + 1})};
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    group->reduce_scatter(outputs, inputs, options)->wait();
    const double expected = op == c10d::ReduceOp::SUM ? triangle(size) : size;
    EXPECT_TRUE(torch::equal(outputs[0], torch::full({rank + 1}, expected)));
  }
}

TEST(ProcessGroup, IssuesWithoutWaitingForTheOtherRanks) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  Tensors first{torch::ones({100000})};
  Tensors second{torch::ones({3})};
  // Would never end if rank 0 waited for the others inside allreduce.
  c10::intrusive_ptr<c10d::Work> works[2];
  if (world->rank() == 0) works[0] = group->allreduce(first);
  world->barrier();
  if (world->rank() != 0) works[0] = group->allreduce(first);
  works[1] = group->allreduce(second);
  works[1]->wait();
  EXPECT_TRUE(works[0]->isCompleted()) << "collectives were not executed in the order of issue";
  works[0]->wait();
  EXPECT_TRUE((first[0] == world->size()).all().item<bool>());
  EXPECT_TRUE((second[0] == world->size()).all().item<bool>());
  group->barrier()->wait();
}

TEST(ProcessGroup, FutureHoldsTheResult) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  Tensors tensors{torch::ones({4})};
  const auto work = group->allreduce(tensors);
  const auto future = work->getFuture();
  auto doubled = future->then(
      [](c10::ivalue::Future& done) { return c10::IValue(done.value().toTensorVector()[0] * 2); },
      c10::TensorType::get());
  future->wait();
  doubled->wait();
  EXPECT_TRUE(torch::equal(doubled->value().toTensor(), torch::full({4}, 2.0 * world->size())));
  EXPECT_EQ(work->result().size(), 1u);
}

TEST(ProcessGroup, RefusesWhatItCannotDo) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  Tensors tensors{torch::ones({4})};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::PRODUCT;
  EXPECT_NE(message_of<c10::Error>([&] { group->allreduce(tensors, options); }).find("SUM, AVG"),
            std::string::npos);
  Tensors integers{torch::ones({4}, torch::kInt)};
  options.reduceOp = c10d::ReduceOp::AVG;
  EXPECT_THROW(group->allreduce(integers, options), c10::Error);
  Tensor output = torch::empty({world->size() + 1});
  Tensor input = torch::empty({1});
  EXPECT_THROW(group->_allgather_base(output, input), c10::Error);
  EXPECT_THROW(as_process_group(nullptr), c10::Error);
}

/// A communicator of one whose all_reduce fails, or waits until it is let go.
class BrokenCommunicator final : public Communicator {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;

    void release() {
      const std::lock_guard<std::mutex> lock(mutex);
      open = true;
      changed.notify_all();
    }
  };

  explicit BrokenCommunicator(std::shared_ptr<Gate> gate = nullptr)
      : Communicator(0, 1, "broken"), gate_(std::move(gate)) {}

 protected:
  void do_all_reduce(const Tensor&, ReduceOp) override {
    if (gate_ == nullptr) throw CommunicationError("the cable is cut");
    std::unique_lock<std::mutex> lock(gate_->mutex);
    gate_->changed.wait(lock, [&] { return gate_->open; });
  }
  Tensor do_all_gather(const Tensor& shard, at::IntArrayRef) override { return shard; }
  Tensor do_reduce_scatter(const Tensor& tensor, at::IntArrayRef) override { return tensor; }
  void do_broadcast(const Tensor&, int) override {}
  void do_barrier() override {}
  std::shared_ptr<Communicator> do_split(int, int) override {
    return std::make_shared<BrokenCommunicator>(gate_);
  }

 private:
  std::shared_ptr<Gate> gate_;
};

TEST(ProcessGroup, CarriesErrorsToWaitAndFuture) {
  const auto group = as_process_group(std::make_shared<BrokenCommunicator>());
  Tensors tensors{torch::ones({1})};
  const auto work = group->allreduce(tensors);
  const auto message = message_of<CommunicationError>([&] { work->wait(); });
  EXPECT_NE(message.find("the cable is cut"), std::string::npos) << message;
  EXPECT_FALSE(work->isSuccess());
  EXPECT_TRUE(work->getFuture()->hasError());
  EXPECT_THROW(work->getFuture()->value(), CommunicationError);
  EXPECT_THROW(group->barrier()->wait(), CommunicationError)
      << "a broken communicator stays broken";
}

TEST(ProcessGroup, IsDestroyedSoonWhileACollectiveIsStuck) {
  const auto gate = std::make_shared<BrokenCommunicator::Gate>();
  c10::intrusive_ptr<c10d::Work> stuck;
  c10::intrusive_ptr<c10d::Work> behind;
  const auto start = std::chrono::steady_clock::now();
  try {
    const auto group = as_process_group(std::make_shared<BrokenCommunicator>(gate));
    Tensors tensors{torch::ones({1})};
    stuck = group->allreduce(tensors);
    behind = group->barrier();
    throw std::runtime_error("this rank fails");
  } catch (const std::runtime_error&) {
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 10);
  gate->release();
  EXPECT_TRUE(stuck->wait());
  EXPECT_THROW(behind->wait(), CommunicationError);
}

TEST(ProcessGroup, FinishesIssuedWorkBeforeItIsDestroyed) {
  const auto world = new_world();
  Tensors tensors{torch::ones({100000})};
  {
    const auto group = as_process_group(world);
    group->allreduce(tensors);
  }
  EXPECT_TRUE((tensors[0] == world->size()).all().item<bool>());
}

TEST(ProcessGroup, Splits) {
  const auto world = new_world();
  const auto group = as_process_group(world);
  const int rank = world->rank();
  std::vector<int> mine;
  for (int r = rank % 2; r < world->size(); r += 2) mine.push_back(r);
  const auto part = group->splitGroup(mine, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  ASSERT_NE(part.get(), nullptr);
  EXPECT_EQ(part->getSize(), static_cast<int>(mine.size()));
  EXPECT_EQ(part->getRank(), rank / 2);
  Tensors tensors{torch::full({1}, rank, torch::kLong)};
  part->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].item<int64_t>(), std::accumulate(mine.begin(), mine.end(), 0));
}

/// Every operation of `comm` against its definition.
void check_communicator(Communicator& comm) {
  const int size = comm.size();
  const int rank = comm.rank();
  for (const auto dtype :
       {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kLong}) {
    auto tensor = torch::full({3, 2}, rank + 1, dtype).t();
    comm.all_reduce(tensor);
    EXPECT_TRUE((tensor == triangle(size)).all().item<bool>()) << dtype;
    tensor.fill_(rank);
    comm.all_reduce(tensor, ReduceOp::max);
    EXPECT_TRUE((tensor == size - 1).all().item<bool>()) << dtype;
    comm.all_reduce(tensor.fill_(rank), ReduceOp::min);
    EXPECT_TRUE((tensor == 0).all().item<bool>()) << dtype;
  }
  std::vector<int64_t> sizes;
  Tensors rows;
  for (int r = 0; r < size; ++r) {
    sizes.push_back((r + size - 1) % size);
    rows.push_back(torch::full({sizes.back(), 3}, r, torch::kHalf));
  }
  EXPECT_TRUE(torch::equal(comm.all_gather(rows[rank], sizes), torch::cat(rows)));
  const auto whole = torch::cat(rows).to(torch::kDouble) * (rank + 1);
  EXPECT_TRUE(torch::equal(comm.reduce_scatter(whole, sizes),
                           rows[rank].to(torch::kDouble) * triangle(size)));
  for (int root = 0; root < size; ++root) {
    auto tensor = torch::full({2, 5}, rank, torch::kByte).t();
    comm.broadcast(tensor, root);
    EXPECT_TRUE((tensor == root).all().item<bool>());
  }
  comm.barrier();
}

TEST(C10dCommunicator, DoesWhatACommunicatorDoes) {
  const auto comm = c10d_communicator(as_process_group(new_world()));
  check_communicator(*comm);
  EXPECT_EQ(comm->counters().all_reduce, 15);
  EXPECT_EQ(comm->counters().all_gather, 1);
  EXPECT_EQ(comm->counters().reduce_scatter, 1);
  EXPECT_EQ(comm->counters().broadcast, comm->size());
  EXPECT_EQ(comm->counters().barrier, 1);
}

TEST(C10dCommunicator, SumsHalfInFloat) {
  const auto comm = c10d_communicator(as_process_group(new_world()));
  // One rank brings 2048, above which half counts in twos; the ones of the others would get lost
  // one by one.
  const float mine = comm->rank() == 0 ? 2048 : 1;
  const auto expected =
      torch::full({4}, 2048.0f + static_cast<float>(comm->size() - 1)).to(torch::kHalf);
  auto tensor = torch::full({4}, mine, torch::kHalf);
  comm->all_reduce(tensor);
  EXPECT_TRUE(torch::equal(tensor, expected));
  const auto whole = torch::full({comm->size()}, mine, torch::kHalf);
  const auto part = comm->reduce_scatter(whole, testing::ones(comm->size()));
  EXPECT_TRUE(torch::equal(part, expected.narrow(0, 0, 1)));
}

TEST(C10dCommunicator, SplitsOrderedByKey) {
  const auto comm = c10d_communicator(as_process_group(new_world()));
  const int rank = comm->rank();
  const auto reversed = comm->split(0, -rank);
  ASSERT_NE(reversed, nullptr);
  EXPECT_EQ(reversed->size(), comm->size());
  EXPECT_EQ(reversed->rank(), comm->size() - 1 - rank);
  check_communicator(*reversed);
  // Twice reversed, and cut in two: the translation of ranks must compose.
  const auto half = reversed->split(rank % 2, -reversed->rank());
  EXPECT_EQ(half->rank(), rank / 2);
  check_communicator(*half);
}

TEST(C10dCommunicator, NegativeColorJoinsNoGroup) {
  const auto comm = c10d_communicator(as_process_group(new_world()));
  const bool outside = comm->rank() == comm->size() - 1;
  const auto part = comm->split(outside ? -1 : 7, 0);
  EXPECT_EQ(part == nullptr, outside);
  if (part != nullptr) check_communicator(*part);
  EXPECT_EQ(comm->split(-1, 0), nullptr);
}

/// A backend of one rank that offers nothing.
class PoorBackend final : public c10d::Backend {
 public:
  PoorBackend() : c10d::Backend(0, 1) {}
  const std::string getBackendName() const override { return "poor"; }
};

/// A backend of one rank that notes the dtype it was to reduce.
class NotingBackend final : public c10d::Backend {
 public:
  NotingBackend() : c10d::Backend(0, 1) {}
  const std::string getBackendName() const override { return "noting"; }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions&) override {
    dtype = tensors[0].scalar_type();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return c10d::Work::create_from_future(future);
  }
  torch::ScalarType dtype = torch::ScalarType::Undefined;
};

std::shared_ptr<Communicator> over_backend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(nullptr, 0, 1);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return c10d_communicator(group);
}

std::shared_ptr<Communicator> poor_communicator() {
  return over_backend(c10::make_intrusive<PoorBackend>());
}

TEST(C10dCommunicator, GivesHalfToTheBackendAsFloat) {
  const auto backend = c10::make_intrusive<NotingBackend>();
  const auto comm = over_backend(backend);
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    const auto tensor = torch::full({3}, 1.5, dtype);
    comm->all_reduce(tensor);
    EXPECT_EQ(backend->dtype, torch::kFloat);
    EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 1.5, dtype)));
  }
  comm->all_reduce(torch::ones({3}, torch::kDouble));
  EXPECT_EQ(backend->dtype, torch::kDouble);
}

TEST(C10dCommunicator, SaysWhatToDoWhereTheBackendCannotSplit) {
  const auto comm = poor_communicator();
  const auto message = message_of<c10::Error>([&] { comm->split(0, 0); });
  EXPECT_NE(message.find("poor"), std::string::npos) << message;
  EXPECT_NE(message.find("new_group"), std::string::npos) << message;
  EXPECT_THROW(c10d_communicator(nullptr), c10::Error);
}

TEST(C10dCommunicator, TurnsBackendErrorsIntoCommunicationErrors) {
  const auto comm = poor_communicator();
  const auto message = message_of<CommunicationError>([&] { comm->all_reduce(torch::ones({1})); });
  EXPECT_NE(message.find("all_reduce #0"), std::string::npos) << message;
  EXPECT_NE(message.find("does not support allreduce"), std::string::npos) << message;
}

}  // namespace
}  // namespace syncnorm
