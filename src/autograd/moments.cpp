#include "autograd/moments.h"

#include <algorithm>
#include <cstring>

#include "autograd/verdicts.h"
#include "comm/doubles.h"
#include "comm/signature.h"
#include "comm/statistics_buffer.h"

namespace syncnorm {
namespace {

enum HeaderWord : int64_t { kCount, kWanting, kHeaderWords };

/// Differing centers would make the sums meaningless, so they are part of what must agree.
uint64_t hash_of(const at::Tensor& values) {
  const auto host = (values.is_cpu() ? values : values.cpu()).contiguous();
  const auto* data = host.const_data_ptr<double>();
  const int64_t n = host.numel();
  const auto mix = [](uint64_t hash, uint64_t bits) {
    hash = (hash ^ bits) * 0x2545f4914f6cdd1du;
    return hash ^ (hash >> 29);
  };
  // Several side by side, since each step waits for the multiplication of the one before.
  constexpr int kLanes = 4;
  uint64_t lanes[kLanes] = {0x9e3779b97f4a7c15u, 1, 2, 3};
  for (int64_t i = 0; i < n; ++i) {
    uint64_t bits = 0;
    const double value = data[i] == 0 ? 0.0 : data[i];  // one zero, whatever its sign
    std::memcpy(&bits, &value, sizeof bits);
    lanes[i % kLanes] = mix(lanes[i % kLanes], bits);
  }
  return mix(mix(lanes[0], lanes[1]), mix(lanes[2], lanes[3]));
}

void describe(const MomentsRequest& request, Signature& signature) {
  const auto prefix = request.label.empty() ? "" : request.label + ": ";
  signature.add(prefix + request.layout.unit, request.layout.slots)
      .add(prefix + "dtype", c10::toString(request.dtype))
      .add(prefix + "eps", request.eps)
      .add(prefix + "gradient mode", request.grad_mode ? "on" : "off");
  if (request.center.defined())
    signature.add(prefix + "running_mean (hash)", hash_of(request.center));
  signature.append(request.details, prefix);
}

std::string describe(const std::vector<MomentsRequest>& requests) {
  Signature signature;
  signature.add("pass", "forward");
  for (const auto& request : requests) describe(request, signature);
  return signature.text();
}

/// Relative error of the variance is about (mean - center)^2 / variance times double's 2^-53;
/// beyond these ratios it would show in the input's dtype. It shows beside eps only, unless the
/// variance itself is kept for running_var, where it matters down to kNoise * eps.
constexpr double kNoise = 0x1p-30;
kernels::Precision precision_of(const MomentsRequest& request) {
  return {request.eps, request.keeps_variance ? kNoise * request.eps : request.eps,
          request.dtype == at::kDouble ? 0x1p10 : 0x1p27};
}

int64_t words_of(const MomentsRequest& request) {
  return kHeaderWords + request.layout.sums() * request.layout.slots;
}

/// A request's place in the buffer: the header, and double [sums, slots].
struct Words {
  Words(const StatisticsBuffer& buffer, int64_t start, const MomentsRequest& request)
      : header(buffer.words(start, kHeaderWords)),
        sums(buffer.words(start + kHeaderWords, {request.layout.sums(), request.layout.slots})) {}
  at::Tensor header, sums;
};

void write_local(MomentsRequest& request, const Words& words) {
  const auto& layout = request.layout;
  const double header[] = {static_cast<double>(layout.values), request.wants_gradient ? 1.0 : 0.0};
  if (words.header.is_cpu()) {
    std::copy_n(header, kHeaderWords, words.header.data_ptr<double>());
  } else {
    words.header.copy_(at::tensor(at::ArrayRef<double>(header), at::kDouble));
  }
  const auto& kernels = kernels::kernels_for(words.sums.device());
  if (request.term.defined()) {
    kernels.add_and_moments(request.term, request.residual, request.input, layout, request.center,
                            words.sums);
    request.term = request.residual = at::Tensor();
  } else {
    kernels.moments(request.input, layout, request.center, words.sums);
  }
}

Moments finish(const MomentsRequest& request, const Words& words, bool* lost_digits) {
  const auto& layout = request.layout;
  const auto header = words.header.is_cpu() ? words.header : words.header.cpu();
  const auto* totals = header.const_data_ptr<double>();
  const auto values = static_cast<int64_t>(totals[kCount]);
  TORCH_CHECK_VALUE(layout.total_values.value_or(values) == values, ModuleScope::current(),
                    ": the ranks' shards add up to ", values, ", not to ", *layout.total_values);
  Moments moments;
  moments.count = layout.count;
  if (!layout.count.each.defined() && layout.count.all == 0)
    moments.count.all = totals[kCount] / static_cast<double>(layout.slots_of_values);
  moments.ranks_wanting_gradient = static_cast<int64_t>(totals[kWanting]);
  moments.statistics = empty_doubles({kernels::kStatisticsRows, layout.slots}, words.sums.device());
  *lost_digits = kernels::kernels_for(words.sums.device())
                     .finish(words.sums, layout, request.center, moments.count,
                             precision_of(request), moments.statistics);
  return moments;
}

/// One exchange; for each request whether digits were lost.
std::vector<Moments> exchange_once(std::vector<MomentsRequest>& requests,
                                   const std::shared_ptr<Communicator>& comm,
                                   std::vector<bool>* lost_digits) {
  int64_t total = 0;
  for (const auto& request : requests) total += words_of(request);
  StatisticsBuffer buffer(comm, total, requests.front().input.data.device());
  std::vector<Words> words;
  int64_t at = 0;
  for (auto& request : requests) {
    words.emplace_back(buffer, at, request);
    write_local(request, words.back());
    at += words_of(request);
  }
  buffer.exchange(describe(requests));
  std::vector<Moments> moments;
  for (size_t i = 0; i < requests.size(); ++i) {
    bool lost = false;
    moments.push_back(finish(requests[i], words[i], &lost));
    lost_digits->push_back(lost);
  }
  return moments;
}

/// Null where the host has to see the sums: double input may need a second exchange.
const kernels::DeferredKernels* deferred_kernels(const std::vector<MomentsRequest>& requests) {
  for (const auto& request : requests)
    if (request.dtype == at::kDouble) return nullptr;
  return kernels::kernels_for(requests.front().input.data.device()).deferred();
}

/// Words in front of the sums: the header, and for centers their hash and its square.
int64_t front_words_of(const MomentsRequest& request) {
  return kHeaderWords + (request.running_mean.defined() ? 2 : 0);
}

/// Queues the sums of one request, whose words begin at `start`, and says what will come of them.
Moments queue_local(MomentsRequest& request, const StatisticsBuffer& buffer, int64_t start,
                    double tag, const Communicator& comm, const kernels::DeferredKernels& kernels) {
  const auto& layout = request.layout;
  const auto header = buffer.words(start, kHeaderWords);
  kernels::Front front{header,
                       {static_cast<double>(layout.values), request.wants_gradient ? 1.0 : 0.0},
                       at::Tensor()};
  if (start == 0) {
    front.words = buffer.front(StatisticsBuffer::kTagWords + kHeaderWords);
    front.values.insert(front.values.begin(), {tag, tag * tag});
  }
  if (request.running_mean.defined()) front.center_hash = buffer.words(start + kHeaderWords, {2});
  Moments moments;
  moments.arriving = std::make_shared<kernels::Arriving>();
  auto& arriving = *moments.arriving;
  arriving.sums = buffer.words(start + front_words_of(request), {layout.sums(), layout.slots});
  arriving.center =
      kernels.moments(request.term.defined() ? request.term : request.input.data, request.residual,
                      request.input, layout, request.running_mean, arriving.sums, front);
  request.term = request.residual = at::Tensor();

  auto& count = moments.count = layout.count;
  if (layout.total_values.has_value() || (!count.each.defined() && count.all == 0)) {
    count.total = header.narrow(0, kCount, 1);
    count.slots_of_total = static_cast<double>(layout.slots_of_values);
  }
  arriving.count = count;
  arriving.precision = precision_of(request);
  arriving.outcome = {at::Tensor(),
                      buffer.front(StatisticsBuffer::kTagWords),
                      tag,
                      static_cast<double>(comm.size()),
                      front.center_hash,
                      static_cast<double>(layout.total_values.value_or(0)),
                      false};
  moments.ranks_wanting_gradient = request.grad_mode ? comm.size() : 0;
  moments.statistics = empty_doubles({kernels::kStatisticsRows, layout.slots}, header.device());
  return moments;
}

std::vector<Moments> exchange_deferred(std::vector<MomentsRequest>& requests,
                                       const std::shared_ptr<Communicator>& comm,
                                       const kernels::DeferredKernels& kernels) {
  Verdicts::raise_found(comm);
  const auto words_with_front = [](const MomentsRequest& request) {
    return front_words_of(request) + request.layout.sums() * request.layout.slots;
  };
  int64_t total = 0;
  for (const auto& request : requests) total += words_with_front(request);
  const auto device = requests.front().input.data.device();
  StatisticsBuffer buffer(comm, total, device);
  // Ranks that wait for their sums, as CPU ranks do, follow another protocol in backward.
  const double tag = buffer.begin("path=deferred;" + describe(requests));
  std::vector<Moments> moments;
  int64_t at = 0;
  for (auto& request : requests) {
    moments.push_back(queue_local(request, buffer, at, tag, *comm, kernels));
    at += words_with_front(request);
  }
  buffer.travel();
  for (auto& each : moments) each.arriving->exchange = buffer.describe();
  return moments;
}

}  // namespace

std::vector<Moments> exchange_moments(std::vector<MomentsRequest>& requests,
                                      const std::shared_ptr<Communicator>& comm) {
  if (const auto* kernels = deferred_kernels(requests))
    return exchange_deferred(requests, comm, *kernels);
  for (auto& request : requests)
    if (request.running_mean.defined())
      request.center =
          kernels::kernels_for(request.running_mean.device()).center(request.running_mean);
  std::vector<bool> lost_digits;
  auto moments = exchange_once(requests, comm, &lost_digits);
  std::vector<MomentsRequest> again;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!lost_digits[i]) continue;
    again.push_back(requests[i]);
    const auto mean = moments[i].statistics[kernels::kMean];
    again.back().center =
        at::where(mean.isfinite(), mean,
                  requests[i].center.defined() ? requests[i].center : at::zeros_like(mean));
  }
  if (again.empty()) return moments;
  comm->count_second_exchange();
  std::vector<bool> still_lost;
  const auto repaired = exchange_once(again, comm, &still_lost);
  size_t next = 0;
  for (size_t i = 0; i < requests.size(); ++i)
    if (lost_digits[i]) moments[i] = repaired[next++];
  return moments;
}

at::Tensor exchange_sums(const at::Tensor& local, const std::shared_ptr<Communicator>& comm,
                         const char* pass) {
  StatisticsBuffer buffer(comm, local.numel(), local.device());
  auto words = buffer.words(0, local.sizes());
  words.copy_(local);
  buffer.exchange(Signature().add("pass", pass).add("words", local.numel()).text());
  return words;
}

}  // namespace syncnorm
