// How should gradients be reduced while the backward pass computes? The training step of a small
// convolutional network, its gradients gathered in buckets as c10d::Reducer does, with the buckets'
// all-reduce
//   none       left out: what computing alone takes
//   at_end     blocking, after the backward pass (the baseline)
//   worker     blocking, on the thread of as_process_group
//   nonblock   MPI_Iallreduce from the computing thread when a bucket is full, MPI_Waitall at the
//   end polled     the same, with MPI_Testall at every gradient, which lets MPI make progress in
//   between
// Modes take turns, so that the machine's moods hit all alike; lower quartiles are printed, since
// other programs only add. Run: launch/run -n 2 bench_overlap_bench

#include <mpi.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "syncnorm/environment.h"
#include "syncnorm/process_group.h"
#include "timing.h"

namespace {

namespace nn = torch::nn;

constexpr int64_t kBucketBytes = 1024 * 1024;
constexpr int kWarmUp = 3;

enum class Mode { none, at_end, worker, nonblock, polled };
const std::vector<std::pair<Mode, const char*>> kModes = {{Mode::none, "none"},
                                                          {Mode::at_end, "at_end"},
                                                          {Mode::worker, "worker"},
                                                          {Mode::nonblock, "nonblock"},
                                                          {Mode::polled, "polled"}};

nn::Sequential network() {
  nn::Sequential net;
  int64_t channels = 3;
  for (const int64_t next : {32, 64, 128, 192, 256}) {
    net->push_back(
        nn::Conv2d(nn::Conv2dOptions(channels, next, 3).stride(next > 32 ? 2 : 1).padding(1)));
    net->push_back(nn::ReLU());
    net->push_back(nn::Conv2d(nn::Conv2dOptions(next, next, 3).padding(1)));
    net->push_back(nn::ReLU());
    channels = next;
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(channels, 10));
  return net;
}

struct Bucket {
  torch::Tensor flat;
  int missing = 0;
  std::vector<std::pair<size_t, int64_t>> members;  // parameter and its offset
};

/// Collects gradients in buckets as they appear and starts their reduction in the way of the
/// current mode.
class Gradients {
 public:
  Gradients(const std::vector<torch::Tensor>& parameters, syncnorm::Communicator& comm,
            c10d::ProcessGroup& group)
      : comm_(comm), group_(group), place_(parameters.size()) {
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi_);
    int64_t length = 0;
    for (size_t i = parameters.size(); i-- > 0;) {
      if (length == 0) buckets_.emplace_back();
      place_[i] = {buckets_.size() - 1, length};
      buckets_.back().members.emplace_back(i, length);
      length += parameters[i].numel();
      if (length * 4 >= kBucketBytes || i == 0) {
        buckets_.back().flat = torch::zeros({length});
        length = 0;
      }
      parameters[i].register_hook(
          [this, i](const torch::Tensor& gradient) { arrived(i, gradient); });
    }
  }
  ~Gradients() { MPI_Comm_free(&mpi_); }

  size_t bucket_count() const { return buckets_.size(); }

  void begin(Mode mode) {
    mode_ = mode;
    for (auto& bucket : buckets_) bucket.missing = static_cast<int>(bucket.members.size());
    requests_.clear();
    works_.clear();
  }

  void finish() {
    if (mode_ == Mode::at_end) {
      for (auto& bucket : buckets_) comm_.all_reduce(bucket.flat);
    }
    for (auto& work : works_) work->wait();
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
  }

  double checksum() const {
    double sum = 0;
    for (const auto& bucket : buckets_)
      sum += bucket.flat.to(torch::kDouble).abs().sum().item<double>();
    return sum;
  }

 private:
  void arrived(size_t index, const torch::Tensor& gradient) {
    auto& bucket = buckets_[place_[index].first];
    bucket.flat.narrow(0, place_[index].second, gradient.numel()).copy_(gradient.reshape(-1));
    if (--bucket.missing == 0) start(bucket);
    if (mode_ == Mode::polled && !requests_.empty()) {
      int done = 0;
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
    }
  }

  void start(Bucket& bucket) {
    if (mode_ == Mode::worker) {
      std::vector<torch::Tensor> tensors{bucket.flat};
      works_.push_back(group_.allreduce(tensors));
    } else if (mode_ == Mode::nonblock || mode_ == Mode::polled) {
      requests_.push_back(MPI_REQUEST_NULL);
      MPI_Iallreduce(MPI_IN_PLACE, bucket.flat.data_ptr(), static_cast<int>(bucket.flat.numel()),
                     MPI_FLOAT, MPI_SUM, mpi_, &requests_.back());
    }
  }

  syncnorm::Communicator& comm_;
  c10d::ProcessGroup& group_;
  MPI_Comm mpi_ = MPI_COMM_NULL;
  std::vector<std::pair<size_t, int64_t>> place_;
  std::vector<Bucket> buckets_;
  std::vector<MPI_Request> requests_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  Mode mode_ = Mode::none;
};

/// Milliseconds of one step.
double step(nn::Sequential& net, const torch::Tensor& images, Gradients& gradients, Mode mode,
            syncnorm::Communicator& comm) {
  net->zero_grad();
  comm.barrier();
  const auto start = std::chrono::steady_clock::now();
  gradients.begin(mode);
  net->forward(images).square().sum().backward();
  gradients.finish();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  auto slowest = torch::tensor(taken.count(), torch::kDouble);
  comm.all_reduce(slowest, syncnorm::ReduceOp::max);
  return slowest.item<double>();
}

double lower_quartile(std::vector<double> values) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 4);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

void print_hardware(int ranks) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  const std::string library(version, static_cast<size_t>(length));
  std::printf("hardware: %s, %u cores in sight; %d ranks of %d threads; %s\n",
              syncnorm::bench::processor().c_str(), std::thread::hardware_concurrency(), ranks,
              at::get_num_threads(), library.substr(0, library.find(',')).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  syncnorm::Environment environment(argc, argv);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 40;
  auto& world = *environment.world();
  torch::manual_seed(1);
  auto net = network();
  const auto group = syncnorm::as_process_group(environment.world());
  Gradients gradients(net->parameters(), world, *group);
  const auto images = torch::randn({4, 3, 32, 32}) + world.rank();
  std::map<Mode, std::vector<double>> times;
  std::map<Mode, double> sums;
  for (int round = 0; round < kWarmUp + rounds; ++round) {
    for (const auto& [mode, name] : kModes) {
      const double taken = step(net, images, gradients, mode, world);
      if (round >= kWarmUp) times[mode].push_back(taken);
      sums[mode] = gradients.checksum();
    }
  }
  if (world.rank() != 0) return 0;
  print_hardware(world.size());
  int64_t elements = 0;
  for (const auto& parameter : net->parameters()) elements += parameter.numel();
  std::printf("gradients: %.1f MB in %zu buckets; lower quartile of %d steps\n", elements * 4e-6,
              gradients.bucket_count(), rounds);
  const double base = lower_quartile(times[Mode::at_end]);
  for (const auto& [mode, name] : kModes) {
    const double taken = lower_quartile(times[mode]);
    const bool right = mode == Mode::none || std::abs(sums[mode] / sums[Mode::at_end] - 1) < 1e-6;
    std::printf("%-9s %8.2f ms  ratio to at_end %.3f  %s\n", name, taken, taken / base,
                mode == Mode::none ? "(not reduced)"
                : right            ? "sums agree"
                                   : "SUMS DIFFER");
    if (!right) return 1;
  }
  return 0;
}
