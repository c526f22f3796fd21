#include "reporter.h"

#include <algorithm>
#include <cstdio>

namespace syncnorm::bench {
namespace {

double quantile(std::vector<double> values, double part) {
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(
                                          part * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

double counter(const benchmark::UserCounters& counters, const char* name) {
  const auto found = counters.find(name);
  return found == counters.end() ? 0.0 : found->second.value;
}

}  // namespace

bool TableReporter::ReportContext(const Context&) {
  std::printf("%s\n", hardware_.c_str());
  std::printf(
      "forward + backward; median of the slowest rank's times; first / this: below 1 the "
      "first of the case is faster\n%-58s %12s %8s %9s %13s %11s\n",
      "", "median (us)", "spread", "GB/s", "first / this", "collectives");
  std::fflush(stdout);
  return true;
}

void TableReporter::ReportRuns(const std::vector<Run>& runs) {
  std::vector<double> times;
  for (const auto& run : runs)
    if (run.run_type == Run::RT_Iteration && !run.error_occurred)
      times.push_back(run.GetAdjustedRealTime());
  if (times.empty()) return;
  const std::string name = runs[0].run_name.function_name;
  const std::string its_case = name.substr(0, name.rfind('/'));
  if (its_case != case_ || times.size() != first_.size()) {
    case_ = its_case;
    first_ = times;
  }
  std::vector<double> ratios;
  for (size_t i = 0; i < times.size(); ++i) ratios.push_back(first_[i] / times[i]);
  const double median = quantile(times, 0.5);
  const double spread = (quantile(times, 0.75) - quantile(times, 0.25)) / median;
  const double rate = counter(runs[0].counters, "bytes_per_second") * times[0] / median * 1e-9;
  char gigabytes[32] = "";
  if (rate > 0) std::snprintf(gigabytes, sizeof gigabytes, "%.2f", rate);
  std::printf("%-58s %12.1f %7.1f%% %9s %13.3f %11.0f\n", name.c_str(), median, 100 * spread,
              gigabytes, quantile(ratios, 0.5), counter(runs[0].counters, "collectives"));
  std::fflush(stdout);
}

}  // namespace syncnorm::bench
