#include "harness.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <benchmark/benchmark.h>
#include <mpi.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <regex>
#include <thread>

#include "hardware.h"
#include "reporter.h"
#include "syncnorm/environment.h"

namespace syncnorm::bench {
namespace {

constexpr const char* kRepetitions = "--benchmark_repetitions=15";

/// Samples of the contestants of one case, measured in turns as they are asked for.
class Turns {
 public:
  explicit Turns(Case description)
      : case_(std::move(description)), samples_(case_.contestants.size()) {}

  /// Seconds of a call in the given repetition, the same on all ranks.
  double sample(size_t contestant, size_t repetition) {
    if (living_ != this) begin();
    while (samples_[contestant].size() <= repetition) {
      for (size_t other = 0; other < samples_.size(); ++other)
        if (other == contestant || selected(other)) measure(other);
    }
    return samples_[contestant][repetition];
  }

  const Case& description() const { return case_; }
  std::string full_name(size_t contestant) const {
    return case_.name + "/" + case_.contestants[contestant].name;
  }

  /// What one call has communicated through the world's communicator.
  const Counters& traffic(size_t contestant) { return traffic_[contestant]; }

 private:
  bool selected(size_t contestant) const {
    const std::string filter = benchmark::GetBenchmarkFilter();
    if (filter.empty() || filter == "all") return true;
    const bool negative = filter[0] == '-';
    const std::regex pattern(negative ? filter.substr(1) : filter, std::regex::extended);
    // Google Benchmark's own name for it, with which it decides whether to run it.
    const auto name = full_name(contestant) +
                      "/iterations:" + std::to_string(calls_of(case_.bytes)) + "/manual_time";
    return std::regex_search(name, pattern) != negative;
  }

  // Inputs of one case at a time are kept, those of the case before are freed.
  void begin() {
    if (living_ != nullptr) living_->calls_.clear();
    living_ = this;
    calls_ = case_.prepare();
    for (const auto& each : case_.contestants)
      TORCH_CHECK(calls_.count(each.name) == 1, case_.name, ": prepare() returns no call named ",
                  each.name);
  }

  void measure(size_t contestant) {
    const auto& name = case_.contestants[contestant].name;
    const auto& call = calls_.at(name);
    auto& world = *Environment::current()->world();
    if (case_.before) case_.before(name);
    world.reset_counters();
    call();  // brings caches and the allocator to the state that this contestant leaves
    traffic_[contestant] = world.counters();
    auto taken = torch::zeros({calls_of(case_.bytes)}, torch::kDouble);
    double* seconds = taken.data_ptr<double>();
    for (int64_t i = 0; i < taken.numel(); ++i) {
      world.barrier();
      const auto start = std::chrono::steady_clock::now();
      call();
      const auto end = std::chrono::steady_clock::now();
      seconds[i] = std::chrono::duration<double>(end - start).count();
    }
    world.all_reduce(taken, ReduceOp::max);
    samples_[contestant].push_back(taken.median().item<double>());
  }

  static inline Turns* living_ = nullptr;
  Case case_;
  Calls calls_;
  std::vector<std::vector<double>> samples_;
  std::map<size_t, Counters> traffic_;
};

void report(benchmark::State& state, Turns& turns, size_t contestant, size_t repetition) {
  const double seconds = turns.sample(contestant, repetition);
  for (auto _ : state) state.SetIterationTime(seconds);
  const auto& description = turns.description();
  const double bytes = static_cast<double>(state.iterations() * description.bytes) *
                       description.contestants[contestant].passes;
  state.SetBytesProcessed(static_cast<int64_t>(bytes));
  const auto& traffic = turns.traffic(contestant);
  state.counters["collectives"] = static_cast<double>(traffic.collectives());
  state.counters["wire_bytes"] = static_cast<double>(traffic.bytes);
}

using Context = std::vector<std::pair<std::string, std::string>>;

Context context_of(const Communicator& world) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  const std::string library(version, static_cast<size_t>(length));
  return {{"processor", processor()},
          {"cores", std::to_string(std::thread::hardware_concurrency())},
          {"ranks", std::to_string(world.size())},
          {"threads", std::to_string(at::get_num_threads())},
          {"capability", at::get_cpu_capability()},
          {"torch", TORCH_VERSION},
          {"mpi", library.substr(0, library.find(','))}};
}

/// The program's arguments with our defaults before them and, on ranks that do not report, without
/// a file to write.
std::vector<std::string> arguments_of(int argc, char** argv, bool reports) {
  std::vector<std::string> arguments{argv[0], kRepetitions};
  for (int i = 1; i < argc; ++i) {
    arguments.emplace_back(argv[i]);
    for (const char* own_clock :
         {"--benchmark_min_warmup_time", "--benchmark_enable_random_interl"})
      TORCH_CHECK_VALUE(arguments.back().rfind(own_clock, 0) != 0, argv[i],
                        ": each rank would decide by itself what to run; leave it out");
  }
  if (!reports) arguments.emplace_back("--benchmark_out=");
  return arguments;
}

int run(int argc, char** argv, const std::function<void()>& add_cases) {
  const auto& world = *Environment::current()->world();
  auto arguments = arguments_of(argc, argv, world.rank() == 0);
  std::vector<char*> pointers;
  for (auto& argument : arguments) pointers.push_back(argument.data());
  int count = static_cast<int>(pointers.size());
  pointers.push_back(nullptr);
  benchmark::Initialize(&count, pointers.data());
  if (count > 1) {
    if (world.rank() == 0) benchmark::ReportUnrecognizedArguments(count, pointers.data());
    return 1;
  }
  std::string hardware;
  for (const auto& [key, value] : context_of(world)) {
    benchmark::AddCustomContext(key, value);
    hardware += (hardware.empty() ? "" : ", ") + key + " " + value;
  }
  add_cases();
  SilentReporter silent;
  TableReporter table(hardware);
  benchmark::BenchmarkReporter* reporter = &silent;
  if (world.rank() == 0) {
    reporter = benchmark::CreateDefaultDisplayReporter();
    if (dynamic_cast<benchmark::ConsoleReporter*>(reporter) != nullptr) reporter = &table;
  }
  const bool found = benchmark::RunSpecifiedBenchmarks(reporter) > 0;
  benchmark::Shutdown();
  return found ? 0 : 1;
}

}  // namespace

void add_case(Case description) {
  const auto turns = std::make_shared<Turns>(std::move(description));
  for (size_t i = 0; i < turns->description().contestants.size(); ++i) {
    benchmark::RegisterBenchmark(
        turns->full_name(i).c_str(),
        [turns, i, repetition = size_t{0}](benchmark::State& state) mutable {
          report(state, *turns, i, repetition++);
        })
        ->Iterations(calls_of(turns->description().bytes))
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

int64_t calls_of(int64_t bytes) {
  return std::clamp<int64_t>((int64_t{16} << 20) / std::max<int64_t>(bytes, 1), 1, 50);
}

int run_benchmarks(int argc, char** argv, const std::function<void()>& add_cases) {
  Environment environment(argc, argv);
  try {
    return run(argc, argv, add_cases);
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    std::fprintf(stderr, "rank %d: %s\n", environment.world()->rank(),
                 torch_error ? torch_error->what_without_backtrace() : error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
    return 1;
  }
}

void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance,
                  const std::string& what) {
  const auto expected = b.to(torch::kDouble);
  const auto difference = (a.to(torch::kDouble) - expected).abs();
  if (difference.numel() == 0) return;
  const double largest = difference.max().item<double>();
  const double allowed = tolerance * (1 + expected.abs().max().item<double>());
  // Written so that a NaN fails.
  TORCH_CHECK(largest <= allowed, what, ": results differ by ", largest, ", allowed are ", allowed,
              ", so there is nothing to time");
}

double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-10;
    case at::kHalf:
      return 1e-2;
    case at::kBFloat16:
      return 6e-2;
    default:
      return 1e-4;
  }
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

}  // namespace syncnorm::bench
