// What a norm costs as ranks and latency grow. The first argument chooses what is measured:
//
//   counters   collectives and bytes that a rank hands in, in groups of 2, 4, 8, ... ranks; with
//              --interface NAME also what its network interface really sends for them
//   delay      step time against a delay added to every collective, and its slope, which is the
//              number of latencies that a step waits for
//   latency    time that communication adds to a norm on one rank, beside what bare MPI all-reduces
//              add, as distributions; latency and inverse bandwidth of MPI's all-reduce
//
// Flags: --rounds N, --channels N, --rows N, --delays US,US,..., --json FILE. The exit status is 1
// where counters or slopes are not what they should be.
//   launch/run -n 16 bench_scale_bench counters
//   launch/run -n 2 bench_scale_bench delay
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "delayed_communicator.h"
#include "hardware.h"
#include "run_on_ranks.h"
#include "scale_mpi.h"
#include "scale_subjects.h"
#include "scale_timing.h"
#include "syncnorm/environment.h"

namespace {

using syncnorm::Communicator;
using namespace syncnorm::bench;
using Comm = std::shared_ptr<Communicator>;

struct Options {
  std::string what;
  int rounds = 0;
  Extents size;
  std::vector<double> delays = {0, 20, 100, 500};
  std::string interface;
  std::string json;
};

double number(const std::string& flag, const std::string& text, double smallest) {
  size_t end = 0;
  double value = -1;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
    end = 0;
  }
  TORCH_CHECK_VALUE(end > 0 && end == text.size() && value >= smallest, flag, " ", text,
                    ": needs a number of at least ", smallest);
  return value;
}

std::vector<double> numbers(const std::string& flag, const std::string& text) {
  std::vector<double> values;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) values.push_back(number(flag, part, 0));
  TORCH_CHECK_VALUE(values.size() > 1 && values.front() != values.back(), flag, " ", text,
                    ": a slope needs two different delays or more");
  return values;
}

Options parse(int argc, char** argv) {
  Options options;
  TORCH_CHECK_VALUE(argc > 1, "say what to measure: counters, delay or latency");
  options.what = argv[1];
  for (int i = 2; i < argc; i += 2) {
    const std::string flag = argv[i];
    TORCH_CHECK_VALUE(i + 1 < argc, flag, " needs a value");
    const std::string value = argv[i + 1];
    if (flag == "--rounds") {
      options.rounds = static_cast<int>(number(flag, value, 1));
    } else if (flag == "--channels") {
      options.size.channels = static_cast<int64_t>(number(flag, value, 1));
    } else if (flag == "--rows") {
      options.size.rows = static_cast<int64_t>(number(flag, value, 1));
    } else if (flag == "--delays") {
      options.delays = numbers(flag, value);
    } else if (flag == "--interface") {
      options.interface = value;
    } else if (flag == "--json") {
      options.json = value;
    } else {
      TORCH_CHECK_VALUE(false, "unknown flag ", flag);
    }
  }
  return options;
}

/// Lines of JSON on rank 0, one a figure, and the same figures on standard output.
class Report {
 public:
  using Fields = std::vector<std::pair<std::string, double>>;

  Report(const Comm& world, const Options& options) : speaks_(world->rank() == 0) {
    if (!speaks_) return;
    if (!options.json.empty()) file_.open(options.json);
    TORCH_CHECK_VALUE(options.json.empty() || file_, options.json, " cannot be written");
    std::printf("%s on %s, %u cores, %d ranks of %d threads\n", options.what.c_str(),
                processor().c_str(), std::thread::hardware_concurrency(), world->size(),
                at::get_num_threads());
  }

  void line(const std::string& name, const Fields& fields) {
    if (!speaks_) return;
    std::printf("%-42s", name.c_str());
    std::ostringstream json;
    for (const auto& [key, value] : fields) {
      std::printf("  %s %.6g", key.c_str(), value);
      json << ", \"" << key << "\": " << value;
    }
    std::printf("\n");
    std::fflush(stdout);
    if (file_.is_open()) file_ << "{\"name\": \"" << name << "\"" << json.str() << "}\n";
  }

 private:
  bool speaks_;
  std::ofstream file_;
};

/// Bytes that the network interface has sent since the system started.
double bytes_sent(const std::string& interface) {
  const std::string path = "/sys/class/net/" + interface + "/statistics/tx_bytes";
  std::ifstream file(path);
  double bytes = 0;
  TORCH_CHECK_VALUE(file >> bytes, path, " cannot be read, so there is no interface ", interface);
  return bytes;
}

/// What the interface sends for a step, on average for each of the ranks in `group`; all ranks of
/// the world call, those outside with an empty step.
double bytes_on_the_wire(Communicator& world, int ranks, int rounds, const std::string& interface,
                         const std::function<void()>& step) {
  world.barrier();
  const double before = bytes_sent(interface);
  world.barrier();
  for (int i = 0; i < rounds; ++i) step();
  world.barrier();
  const double sent = bytes_sent(interface) - before;
  world.barrier();
  return sent / rounds / ranks;
}

bool run_counters(const Comm& world, const Options& options, Report& report) {
  const int rounds = options.rounds > 0 ? options.rounds : 200;
  std::map<std::string, std::pair<int64_t, int64_t>> first;
  bool constant = true;
  for (int ranks = std::min(2, world->size()); ranks <= world->size(); ranks *= 2) {
    const bool member = world->rank() < ranks;
    const auto group = world->split(member ? 0 : -1, world->rank());
    std::vector<Subject> subjects(4);
    if (member) subjects = subjects_over(group, options.size);
    for (const auto& subject : subjects) {
      Report::Fields fields{{"ranks", ranks}};
      if (member) {
        group->reset_counters();
        subject.step();
        const auto counters = group->counters();
        const std::pair<int64_t, int64_t> now{counters.collectives(), counters.bytes};
        constant = constant && first.emplace(subject.name, now).first->second == now;
        fields.emplace_back("collectives", now.first);
        fields.emplace_back("bytes_handed_in", now.second);
      }
      if (!options.interface.empty()) {
        const auto step = [&] {
          if (member) subject.step();
        };
        fields.emplace_back("bytes_sent",
                            bytes_on_the_wire(*world, ranks, rounds, options.interface, step));
      }
      report.line(subject.name, fields);
    }
  }
  auto differs = torch::tensor(constant ? 0 : 1);
  world->all_reduce(differs, syncnorm::ReduceOp::max);
  return differs.item<int64_t>() == 0;
}

/// Slope of the least-squares line through (x, y).
double slope(const std::vector<double>& x, const std::vector<double>& y) {
  const auto a = torch::tensor(x, torch::kDouble);
  const auto b = torch::tensor(y, torch::kDouble);
  const auto from_mean = a - a.mean();
  return (from_mean.dot(b) / from_mean.dot(a)).item<double>();
}

bool run_delay(const Comm& world, const Options& options, Report& report) {
  const int rounds = options.rounds > 0 ? options.rounds : 100;
  const auto slow = std::make_shared<DelayedCommunicator>(world, Link{});
  const auto subjects = subjects_over(slow, options.size);
  bool right = true;
  for (const auto& subject : subjects) {
    slow->reset_counters();
    subject.step();
    const auto collectives = static_cast<double>(slow->counters().collectives());
    std::vector<std::function<void()>> calls;
    for (const double delay : options.delays)
      calls.push_back([&slow, &subject, delay] {
        slow->set_link({delay * 1e-6});
        subject.step();
      });
    const auto times = times_in_turns(*world, rounds, calls);
    Report::Fields fields;
    std::vector<double> quartiles;  // lower ones: other programs only add
    for (size_t i = 0; i < calls.size(); ++i) {
      quartiles.push_back(quantile(times[i], 0.25));
      fields.emplace_back("us_at_" + std::to_string(std::lround(options.delays[i])),
                          quartiles.back());
    }
    const double latencies = slope(options.delays, quartiles);
    fields.emplace_back("slope", latencies);
    fields.emplace_back("collectives", collectives);
    report.line(subject.name, fields);
    right = right && std::round(latencies) == collectives;
  }
  return right;
}

void report_distribution(Report& report, const std::string& name, const std::vector<double>& times,
                         const Report::Fields& more) {
  Report::Fields fields{{"p10_us", quantile(times, 0.1)},
                        {"p50_us", quantile(times, 0.5)},
                        {"p90_us", quantile(times, 0.9)},
                        {"p99_us", quantile(times, 0.99)},
                        {"max_us", quantile(times, 1)}};
  fields.insert(fields.end(), more.begin(), more.end());
  report.line(name, fields);
}

/// Each norm over the world, over MPI's all-reduces with nothing round them, and over this rank
/// alone, which is the norm without any communication.
void report_added_time(const Comm& world, const Options& options, int rounds, Report& report) {
  const std::vector<Comm> comms = {
      world, std::make_shared<BareCommunicator>(*world, Call::blocking),
      std::make_shared<BareCommunicator>(*world, Call::polled), syncnorm::self_communicator()};
  std::vector<std::vector<Subject>> subjects;
  for (const auto& comm : comms) subjects.push_back(norms_over(comm, options.size));
  for (size_t i = 0; i < subjects.front().size(); ++i) {
    std::vector<std::function<void()>> calls;
    for (const auto& over : subjects) calls.push_back(over[i].step);
    const auto times = times_in_turns(*world, rounds, calls);
    const double alone = quantile(times.back(), 0.5);
    for (size_t k = 0; k < comms.size(); ++k) {
      report_distribution(report, subjects[k][i].name + " over " + comms[k]->name(), times[k],
                          {{"added_us", quantile(times[k], 0.5) - alone}});
    }
  }
}

/// Latency and inverse bandwidth of MPI's all-reduces. Between two ranks a blocking one is one
/// exchange, alpha + bytes * beta.
void report_link(const Comm& world, int rounds, Report& report) {
  const std::vector<int64_t> words = {1, 128, 1024, 8192, 65536, 524288};
  std::vector<double> buffer(static_cast<size_t>(words.back()));
  for (const auto call : {Call::blocking, Call::polled}) {
    BareCommunicator bare(*world, call);
    std::vector<std::function<void()>> calls;
    for (const int64_t count : words)
      calls.push_back([&bare, &buffer, count] { bare.reduce(buffer.data(), count); });
    const auto times = times_in_turns(*world, rounds, calls);
    for (size_t i = 0; i < words.size(); ++i)
      report_distribution(report, bare.name() + " " + std::to_string(words[i] * 8) + " B", times[i],
                          {});
    const double small = quantile(times[1], 0.5);
    const double large = quantile(times.back(), 0.5);
    const auto bytes = static_cast<double>((words.back() - words[1]) * 8);
    report.line(bare.name() + " fit",
                {{"alpha_us", small}, {"beta_ns_per_byte", (large - small) / bytes * 1e3}});
  }
}

bool run_latency(const Comm& world, const Options& options, Report& report) {
  const int rounds = options.rounds > 0 ? options.rounds : 1000;
  report_added_time(world, options, rounds, report);
  report_link(world, std::max(10, rounds / 10), report);
  return true;
}

int run(const Comm& world, int argc, char** argv) {
  const auto options = parse(argc, argv);
  const std::map<std::string, bool (*)(const Comm&, const Options&, Report&)> ways = {
      {"counters", run_counters}, {"delay", run_delay}, {"latency", run_latency}};
  const auto way = ways.find(options.what);
  TORCH_CHECK_VALUE(way != ways.end(), options.what, " is none of counters, delay and latency");
  torch::manual_seed(1);
  Report report(world, options);
  const bool right = way->second(world, options, report);
  if (!right && world->rank() == 0) std::printf("NOT AS EXPECTED\n");
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return syncnorm::bench::run_on_ranks(argc, argv, run); }
