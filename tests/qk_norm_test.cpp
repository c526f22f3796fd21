// Normalised queries and keys, per head and over the width, against plain operations on all heads,
// with key heads that several ranks hold.
#include "syncnorm/qk_norm.h"

#include <gtest/gtest.h>

#include "support/world.h"
#include "syncnorm/linear.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

constexpr double kTolerance = 1e-12;  // both sides in double, sums of some hundred terms

struct Setting {
  int64_t heads, kv_heads, dim;
  QKNormSpan span;
  NormKind norm;
};

struct Whole {
  torch::Tensor q, k, q_weight, k_weight, dq, dk;
};

torch::Tensor norm_last(const torch::Tensor& x, NormKind kind) {
  const auto size = x.sizes().slice(x.dim() - 1);
  return kind == NormKind::layer ? torch::layer_norm(x, size, {}, {}, 1e-6)
                                 : at::rms_norm(x, size, std::nullopt, 1e-6);
}

torch::Tensor reference(const torch::Tensor& x, const torch::Tensor& weight,
                        const Setting& setting) {
  if (setting.span == QKNormSpan::head) return norm_last(x, setting.norm) * weight;
  return (norm_last(x.flatten(-2), setting.norm) * weight).view(x.sizes());
}

/// Heads of this rank: [offset, size) of Q and of K.
std::pair<Range, Range> heads_of(const Setting& setting, const Communicator& comm) {
  const auto rows = qkv_rows(setting.heads, setting.kv_heads, 1, comm.size())[comm.rank()];
  if (rows.empty()) return {};
  return {rows[0], {rows[1].offset - setting.heads, rows[1].size}};
}

/// How many ranks hold each key head.
torch::Tensor holders(const Setting& setting, int ranks) {
  auto count = torch::zeros({setting.kv_heads}, torch::kDouble);
  for (const auto& rows : qkv_rows(setting.heads, setting.kv_heads, 1, ranks))
    if (!rows.empty()) count.narrow(0, rows[1].offset - setting.heads, rows[1].size) += 1;
  return count.view({-1, 1});
}

/// Sum over ranks of each rank's heads, put in their place.
torch::Tensor summed(const torch::Tensor& mine, const Range& heads, int64_t total,
                     Communicator& comm) {
  auto shape = mine.sizes().vec();
  shape[shape.size() - 2] = total;
  auto whole = torch::zeros(shape, torch::kDouble);
  if (heads.size > 0) whole.narrow(-2, heads.offset, heads.size).copy_(mine);
  comm.all_reduce(whole);
  return whole;
}

void run(const Setting& setting, const std::shared_ptr<Communicator>& comm) {
  torch::manual_seed(setting.heads * 10 + setting.kv_heads);
  const auto draw = [&](std::vector<int64_t> shape) {
    return torch::randn(shape, torch::kDouble).set_requires_grad(true);
  };
  const auto [h, kv, d] = std::tuple(setting.heads, setting.kv_heads, setting.dim);
  const bool width = setting.span == QKNormSpan::width;
  Whole whole{draw({2, 3, h, d}),
              draw({2, 3, kv, d}),
              draw({width ? h * d : d}),
              draw({width ? kv * d : d}),
              torch::randn({2, 3, h, d}, torch::kDouble),
              torch::randn({2, 3, kv, d}, torch::kDouble)};
  const auto q_expected = reference(whole.q, whole.q_weight, setting);
  const auto k_expected = reference(whole.k, whole.k_weight, setting);
  torch::autograd::backward({q_expected, k_expected}, {whole.dq, whole.dk});

  QKNorm norm(QKNormOptions(h, d)
                  .kv_heads(kv)
                  .span(setting.span)
                  .norm(setting.norm)
                  .communicator(comm)
                  .name("qk"));
  norm->to(torch::kDouble);
  const auto [q_heads, k_heads] = heads_of(setting, *comm);
  {
    const torch::NoGradGuard no_grad;
    const auto cut = [&](const torch::Tensor& weight, const Range& heads) {
      return width ? weight.narrow(0, heads.offset * d, heads.size * d) : weight;
    };
    norm->q_weight.copy_(cut(whole.q_weight, q_heads));
    norm->k_weight.copy_(cut(whole.k_weight, k_heads));
  }
  auto q =
      whole.q.detach().narrow(-2, q_heads.offset, q_heads.size).clone().set_requires_grad(true);
  auto k =
      whole.k.detach().narrow(-2, k_heads.offset, k_heads.size).clone().set_requires_grad(true);
  comm->reset_counters();
  const auto [qn, kn] = norm->forward(q, k);
  EXPECT_EQ(comm->counters().collectives(), width ? 1 : 0);
  comm->reset_counters();
  // Holders of a key head see parts of its gradient that add up to the whole.
  const auto share = (1 / holders(setting, comm->size()));
  const auto dk = (whole.dk * share).narrow(-2, k_heads.offset, k_heads.size);
  torch::autograd::backward({qn, kn}, {whole.dq.narrow(-2, q_heads.offset, q_heads.size), dk});
  const bool shared = width && holders(setting, comm->size()).max().item<double>() > 1;
  EXPECT_EQ(comm->counters().collectives(), shared ? 2 : 1);

  EXPECT_LT(relative_difference(qn, q_expected.narrow(-2, q_heads.offset, q_heads.size)),
            kTolerance);
  EXPECT_LT(relative_difference(kn, k_expected.narrow(-2, k_heads.offset, k_heads.size)),
            kTolerance);
  EXPECT_LT(relative_difference(summed(q.grad(), q_heads, h, *comm), whole.q.grad()), kTolerance);
  EXPECT_LT(relative_difference(summed(k.grad(), k_heads, kv, *comm), whole.k.grad()), kTolerance);
  const auto expected_weight = [&](const torch::Tensor& gradient, const Range& heads) {
    return width ? gradient.narrow(0, heads.offset * d, heads.size * d) : gradient;
  };
  EXPECT_LT(
      relative_difference(norm->q_weight.grad(), expected_weight(whole.q_weight.grad(), q_heads)),
      kTolerance);
  EXPECT_LT(
      relative_difference(norm->k_weight.grad(), expected_weight(whole.k_weight.grad(), k_heads)),
      kTolerance);
  if (!width) {
    EXPECT_TRUE(bit_equal_across(*comm, norm->k_weight.grad()));
  }
}

TEST(QKNorm, EqualsTheNormOfAllHeads) {
  const auto comm = new_world();
  for (const auto span : {QKNormSpan::head, QKNormSpan::width})
    for (const auto kind : {NormKind::rms, NormKind::layer})
      for (const auto& [heads, kv] :
           {std::pair<int64_t, int64_t>{8, 8}, {8, 2}, {6, 3}, {8, 1}, {3, 3}, {2, 1}}) {
        SCOPED_TRACE(::testing::Message()
                     << heads << " heads, " << kv << " key heads, span " << static_cast<int>(span));
        run({heads, kv, 5, span, kind}, comm);
      }
}

TEST(QKNorm, HalfWithFloatWeights) {
  const auto comm = new_world();
  QKNorm norm(QKNormOptions(4, 16).communicator(comm));
  const auto [q, k] = heads_of({4, 4, 16, QKNormSpan::head, NormKind::rms}, *comm);
  const auto x = torch::full({3, q.size, 16}, 300, torch::kHalf);
  const auto [qn, kn] = norm->forward(x, x);
  EXPECT_EQ(qn.scalar_type(), torch::kHalf);
  EXPECT_TRUE(torch::equal(qn, torch::ones_like(x)));
}

TEST(QKNorm, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  QKNorm norm(QKNormOptions(4, 8).communicator(comm).name("qk"));
  const auto message = message_of<c10::Error>([&] {
    norm->forward(torch::randn({2, 9, 8}), torch::randn({2, 9, 8}));
  });
  EXPECT_NE(message.find("expects q"), std::string::npos) << message;
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
