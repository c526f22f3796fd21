// What does it bring to reduce gradients while backward still computes? One training step of a
// convolutional network under data parallelism, in four ways that take turns:
//
//   overlapped     DistributedDataParallel: buckets travel as soon as their gradients are there
//   in turn        backward first, then the same buckets one after the other
//   compute        forward and backward without any reduction
//   communicate    the reductions without forward and backward
//
// The last two are the parts, whose sum a step without overlap takes and whose larger one no step
// can beat. Gradients of the first two are compared before anything is timed; each round counts on
// its slowest rank. Flags:
//   --width N         channels of the first layers, 32; parameters grow with its square
//   --images N        a rank and step, 4; computation grows with it
//   --bucket-kib N    gradients reduced together, 1024
//   --latency-us X, --gbit-per-s X   a slower network: each reduction first sleeps this long, while
//                     the core is free for other threads
//   --rounds N        40
//   --json FILE
// Run: launch/run -n 2 bench_overlap_bench --gbit-per-s 5
#include <mpi.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "delayed_communicator.h"
#include "hardware.h"
#include "run_on_ranks.h"
#include "scale_timing.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/environment.h"

namespace {

namespace nn = torch::nn;
using namespace syncnorm::bench;
using Comm = std::shared_ptr<syncnorm::Communicator>;
using Replicas = syncnorm::DistributedDataParallel<nn::Sequential>;

struct Options {
  std::map<std::string, double> numbers = {{"--width", 32},        {"--images", 4},
                                           {"--bucket-kib", 1024}, {"--latency-us", 0},
                                           {"--gbit-per-s", 0},    {"--rounds", 40}};
  std::string json;

  int64_t whole(const std::string& flag) const { return static_cast<int64_t>(numbers.at(flag)); }
  int64_t bucket_bytes() const { return whole("--bucket-kib") * 1024; }
  bool slower() const { return numbers.at("--latency-us") > 0 || numbers.at("--gbit-per-s") > 0; }
  Link link() const {
    const double rate = numbers.at("--gbit-per-s") * 1e9 / 8;
    return {numbers.at("--latency-us") * 1e-6, rate > 0 ? 1 / rate : 0, /*sleeps=*/true};
  }
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    TORCH_CHECK_VALUE(i + 1 < argc, flag, " needs a value");
    if (flag == "--json") {
      options.json = argv[i + 1];
      continue;
    }
    const auto number = options.numbers.find(flag);
    TORCH_CHECK_VALUE(number != options.numbers.end(), "unknown flag ", flag);
    const double smallest = number->second == 0 ? 0 : 1;
    char* end = nullptr;
    number->second = std::strtod(argv[i + 1], &end);
    TORCH_CHECK_VALUE(end != argv[i + 1] && *end == '\0' && number->second >= smallest, flag, " ",
                      argv[i + 1], ": needs a number of at least ", smallest);
  }
  return options;
}

nn::Sequential network(int64_t width) {
  nn::Sequential net;
  int64_t channels = 3;
  for (const int64_t factor : {1, 2, 4, 6, 8}) {
    const int64_t next = factor * width;
    const int64_t stride = factor > 1 ? 2 : 1;
    net->push_back(nn::Conv2d(nn::Conv2dOptions(channels, next, 3).stride(stride).padding(1)));
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

/// The buckets that c10d::Reducer makes of these parameters, for reducing them without it.
class Buckets {
 public:
  Buckets(std::vector<torch::Tensor> parameters, int64_t cap_bytes) {
    constexpr int64_t kFirstBytes = 1024 * 1024;
    int64_t bytes = 0;
    for (size_t i = parameters.size(); i-- > 0;) {
      if (bytes == 0) members_.emplace_back();
      members_.back().push_back(parameters[i]);
      bytes += static_cast<int64_t>(parameters[i].nbytes());
      if (bytes >= (members_.size() == 1 ? std::min(cap_bytes, kFirstBytes) : cap_bytes)) bytes = 0;
    }
    fill_();
  }

  size_t count() const { return members_.size(); }

  /// Copies of the gradients, or zeros where there are none yet.
  void fill_() {
    flat_.clear();
    for (const auto& bucket : members_) {
      std::vector<torch::Tensor> parts;
      for (const auto& parameter : bucket)
        parts.push_back(
            (parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter))
                .reshape(-1));
      flat_.push_back(torch::cat(parts));
    }
  }

  void reduce(syncnorm::Communicator& comm) {
    for (const auto& bucket : flat_) comm.all_reduce(bucket);
  }

  /// Averages of the gradients over the ranks become the gradients.
  void average(syncnorm::Communicator& comm) {
    fill_();
    for (size_t i = 0; i < flat_.size(); ++i) {
      comm.all_reduce(flat_[i]);
      flat_[i].div_(comm.size());
      int64_t start = 0;
      for (const auto& parameter : members_[i]) {
        const int64_t count = parameter.numel();
        parameter.grad().copy_(flat_[i].narrow(0, start, count).view_as(parameter));
        start += count;
      }
    }
  }

 private:
  std::vector<std::vector<torch::Tensor>> members_;
  std::vector<torch::Tensor> flat_;
};

/// One of the four ways, by name.
using Way = std::pair<std::string, std::function<void()>>;

std::vector<Way> four_ways(nn::Sequential net, Replicas& replicas, Buckets& buckets,
                           const torch::Tensor& images, const Comm& comm) {
  const std::function<void()> compute = [net, images, &replicas]() mutable {
    net->zero_grad();
    replicas(images).square().sum().backward();
  };
  const std::function<void()> alone = [compute, &replicas] {
    const auto guard = replicas.no_sync();
    compute();
  };
  return {{"overlapped", compute},
          {"in turn",
           [alone, comm, &buckets] {
             alone();
             buckets.average(*comm);
           }},
          {"compute", alone},
          {"communicate", [comm, &buckets] { buckets.reduce(*comm); }}};
}

/// Raises unless the first two ways leave the same gradients. They add the same two or more floats
/// in an order of their own.
void check_gradients(nn::Sequential net, const std::vector<Way>& ways) {
  ways[0].second();
  std::vector<torch::Tensor> overlapped;
  for (const auto& parameter : net->parameters()) overlapped.push_back(parameter.grad().clone());
  ways[1].second();
  for (size_t i = 0; i < overlapped.size(); ++i) {
    const auto other = net->parameters()[i].grad();
    const double allowed = 1e-5 * other.abs().max().item<double>();
    const double difference = (overlapped[i] - other).abs().max().item<double>();
    TORCH_CHECK(difference <= allowed, "gradients of parameter ", i, " differ by ", difference,
                ", so there is nothing to time");
  }
}

void print_setting(nn::Sequential net, const Buckets& buckets, const Options& options, int ranks) {
  int64_t elements = 0;
  for (const auto& parameter : net->parameters()) elements += parameter.numel();
  std::printf("%s, %u cores, %d ranks of %d threads; %.1f MB of gradients in %zu buckets",
              processor().c_str(), std::thread::hardware_concurrency(), ranks,
              at::get_num_threads(), static_cast<double>(elements) * 4e-6, buckets.count());
  if (options.slower()) {
    std::printf("; each reduction waits %.0f us", options.numbers.at("--latency-us"));
    if (options.numbers.at("--gbit-per-s") > 0)
      std::printf(" and for %.1f Gbit/s", options.numbers.at("--gbit-per-s"));
  }
  std::printf("\n");
}

void report(const std::vector<Way>& ways, const std::vector<std::vector<double>>& times,
            const Options& options) {
  std::ofstream json;
  if (!options.json.empty()) {
    json.open(options.json);
    TORCH_CHECK(json, options.json, " cannot be written");
  }
  std::vector<double> medians;
  for (size_t i = 0; i < ways.size(); ++i) {
    const double low = quantile(times[i], 0.25) / 1e3;
    const double high = quantile(times[i], 0.75) / 1e3;
    medians.push_back(quantile(times[i], 0.5) / 1e3);
    std::printf("%-12s %9.2f ms  (quartiles %.2f to %.2f)\n", ways[i].first.c_str(), medians[i],
                low, high);
    if (json.is_open())
      json << "{\"name\": \"" << ways[i].first << "\", \"ms\": " << medians[i]
           << ", \"lower_quartile_ms\": " << low << ", \"upper_quartile_ms\": " << high << "}\n";
  }
  const double sum = medians[2] + medians[3];
  std::printf("overlapped / in turn %.3f, / sum of parts %.3f, / larger part %.3f\n",
              medians[0] / medians[1], medians[0] / sum,
              medians[0] / std::max(medians[2], medians[3]));
}

int run(const Comm& world, int argc, char** argv) {
  const auto options = parse(argc, argv);
  Comm comm = world;
  if (options.slower()) comm = std::make_shared<DelayedCommunicator>(world, options.link());
  torch::manual_seed(1);
  auto net = network(options.whole("--width"));
  Replicas replicas(net,
                    syncnorm::DistributedDataParallelOptions().communicator(comm).bucket_cap_bytes(
                        options.bucket_bytes()));
  Buckets buckets(net->parameters(), options.bucket_bytes());
  const auto images = torch::randn({options.whole("--images"), 3, 32, 32}) + world->rank();
  const auto ways = four_ways(net, replicas, buckets, images, comm);
  check_gradients(net, ways);
  std::vector<std::function<void()>> calls;
  for (const auto& way : ways) calls.push_back(way.second);
  const auto times = times_in_turns(*world, static_cast<int>(options.whole("--rounds")), calls);
  if (world->rank() == 0) {
    print_setting(net, buckets, options, world->size());
    report(ways, times, options);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return syncnorm::bench::run_on_ranks(argc, argv, run); }
