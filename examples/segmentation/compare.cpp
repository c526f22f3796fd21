#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "figures.h"
#include "job.h"
#include "trainer.h"

namespace segmentation {
namespace {

using Clock = std::chrono::steady_clock;

const std::vector<std::string> kNorms = {"batch", "sync", "group"};
const std::vector<int64_t> kBatches = {1, 2, 4};
constexpr int64_t kEpochs = 8, kQuickEpochs = 3;

/// Peak learning rate at a global batch of 4, from a short search on this data; it grows linearly
/// with the global batch (Goyal et al. 2017), alike for batch and sync, which differ in nothing but
/// whose statistics they take.
double base_rate(const std::string& norm) { return norm == "group" ? 0.4 : 0.1; }

/// One run of the comparison.
struct Setting {
  std::string norm;
  int64_t batch_per_rank;
  uint64_t seed;

  std::string text() const {
    return norm + " norm, " + std::to_string(batch_per_rank) + " a rank, seed " +
           std::to_string(seed);
  }
};

class Comparison {
 public:
  Comparison(Job& job, const Dataset& dataset, std::string hardware)
      : job_(job),
        dataset_(dataset),
        hardware_(std::move(hardware)),
        checksum_(dataset.checksum()) {
    auto& options = job_.options;
    if (options.given.count("epochs") == 0)
      options.recipe.epochs = options.quick ? kQuickEpochs : kEpochs;
    const auto seeds = static_cast<uint64_t>(options.quick ? 1 : options.seeds);
    // Seeds outermost: a comparison that is stopped early is still balanced.
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      for (const auto batch : kBatches) {
        for (const auto& norm : kNorms) settings_.push_back({norm, batch, seed});
      }
    }
  }

  int execute() {
    read_finished();
    job_.console.line(format("%zu runs of %ld epochs (%ld pictures each), %zu of them done before",
                             settings_.size(), job_.options.recipe.epochs, pictures(),
                             done_.size()));
    const auto start = Clock::now();
    size_t fresh = 0;
    for (size_t i = 0; i < settings_.size(); ++i) {
      if (done_.count(i) > 0) continue;
      auto result = run(i);
      if (!result) return interrupted();
      keep(i, std::move(*result));
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      ++fresh;
      job_.console.line(format(
          "%2zu/%zu  %-32s test mIoU %.4f  %5.1f images/s  %s left", done_.size(), settings_.size(),
          settings_[i].text().c_str(), done_[i].at("test").at("miou").get<double>(),
          done_[i].at("images_per_second").get<double>(),
          duration_text(seconds / fresh * (settings_.size() - done_.size())).c_str()));
    }
    report();
    return 0;
  }

 private:
  int64_t pictures() const {
    return job_.options.recipe.epochs * static_cast<int64_t>(dataset_.train.size());
  }
  std::string path(const std::string& name) const {
    return job_.options.output.folder + "/" + name;
  }

  Recipe recipe(const Setting& setting) const {
    auto recipe = job_.options.recipe;
    recipe.norm = setting.norm;
    recipe.batch_per_rank = setting.batch_per_rank;
    recipe.seed = setting.seed;
    recipe.lr = base_rate(setting.norm) *
                static_cast<double>(setting.batch_per_rank * job_.world().size()) / 4;
    return recipe;
  }

  /// What makes two runs the same run.
  nlohmann::json identity(const Setting& setting) const {
    auto fields = to_json(recipe(setting));
    for (const auto* place : {"data", "images", "masks"}) fields.erase(place);
    return {{"recipe", fields}, {"ranks", job_.world().size()}, {"checksum", checksum_}};
  }

  /// Every rank reads the file, so all of them skip the same runs.
  void read_finished() {
    agree(job_.world(), [&] {
      if (job_.is_root()) std::filesystem::create_directories(job_.options.output.folder);
      const auto lines = read_json_lines(path("compare.jsonl"));
      for (size_t i = 0; i < settings_.size(); ++i) {
        const auto wanted = identity(settings_[i]);
        for (const auto& line : lines) {
          if (line.value("run", nlohmann::json()) == wanted) done_[i] = line;
        }
      }
      if (job_.is_root()) log_.emplace(path("compare.jsonl"));
    });
  }

  /// nullopt where the job was asked to stop.
  std::optional<nlohmann::json> run(size_t index) {
    const auto recipe = this->recipe(settings_[index]);
    Trainer trainer(recipe, dataset_, job_.placement);
    const auto label =
        format("%2zu/%zu  %s", done_.size() + 1, settings_.size(), settings_[index].text().c_str());
    const auto begin = Clock::now();
    Position position;
    while (position.epoch < recipe.epochs) {
      const auto before = position.epoch;
      trainer.train_epoch(position, [&](const StepReport& report) {
        const double done = static_cast<double>(
            before * static_cast<int64_t>(dataset_.train.size()) + report.images);
        job_.console.bar(label, done / static_cast<double>(pictures()),
                         format("loss %.4f", report.loss));
      });
      if (trainer.stopping()) return std::nullopt;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    return nlohmann::json{{"run", identity(settings_[index])},
                          {"test", to_json(trainer.test())},
                          {"images_per_second", static_cast<double>(pictures()) / seconds}};
  }

  void keep(size_t index, nlohmann::json result) {
    agree(job_.world(), [&] {
      if (job_.is_root()) log_->write(result);
    });
    done_[index] = std::move(result);
  }

  int interrupted() {
    job_.console.line(
        format("stopped as asked with %zu of %zu runs done; the same command does the others",
               done_.size(), settings_.size()));
    return 0;
  }

  std::vector<double> scores(const std::string& norm, int64_t batch) const {
    std::vector<double> values;
    for (const auto& [index, line] : done_) {
      if (settings_[index].norm != norm || settings_[index].batch_per_rank != batch) continue;
      values.push_back(line.at("test").at("miou").get<double>());
    }
    return values;
  }

  /// "0.5612 ± 0.0103", the spread being the standard deviation over seeds.
  static std::string summary(const std::vector<double>& values) {
    double mean = 0, squares = 0;
    for (const double value : values) mean += value / static_cast<double>(values.size());
    for (const double value : values) squares += (value - mean) * (value - mean);
    if (values.size() < 2) return format("%.3f", mean);
    return format("%.3f ± %.3f", mean, std::sqrt(squares / static_cast<double>(values.size() - 1)));
  }

  std::string table() const {
    const auto ranks = job_.world().size();
    std::string text =
        "| images a rank | batch norm | sync norm | group norm |\n| --- | --- | --- | --- |\n";
    for (const auto batch : kBatches) {
      text += "| " + std::to_string(batch) + " |";
      for (const auto& norm : kNorms) {
        const auto pooled = norm == "batch" ? batch : norm == "sync" ? batch * ranks : 0;
        text += " " + summary(scores(norm, batch)) +
                (pooled > 0 ? format(" (over %ld)", pooled) : "") + " |";
      }
      text += "\n";
    }
    return text;
  }

  void report() {
    const auto caption = format(
        "Test mIoU after %ld pictures (%ld epochs), %s; in brackets, images that share statistics.",
        pictures(), job_.options.recipe.epochs,
        job_.options.quick
            ? "one seed"
            : format("mean and standard deviation over %ld seeds", job_.options.seeds).c_str());
    job_.console.line("\n" + caption + "\n\n" + table() + "\n" + hardware_);
    nlohmann::json rows = nlohmann::json::array();
    for (const auto& norm : kNorms) {
      for (const auto batch : kBatches) {
        rows.push_back({{"norm", norm}, {"batch_per_rank", batch}, {"miou", scores(norm, batch)}});
      }
    }
    agree(job_.world(), [&] {
      if (!job_.is_root()) return;
      std::ofstream(path("compare.md")) << caption << "\n\n"
                                        << table() << "\n"
                                        << hardware_ << "\n";
      std::ofstream(path("compare.json")) << nlohmann::json{{"ranks", job_.world().size()},
                                                            {"pictures", pictures()},
                                                            {"hardware", hardware_},
                                                            {"rows", rows}}
                                          << "\n";
    });
    draw(job_.options.output, SEGMENTATION_PLOTS, job_.console);
  }

  Job& job_;
  const Dataset& dataset_;
  std::string hardware_, checksum_;
  std::vector<Setting> settings_;
  std::map<size_t, nlohmann::json> done_;
  std::optional<JsonLines> log_;
};

}  // namespace

int compare(Job& job) {
  if (job.options.output.folder.empty()) job.options.output.folder = "runs/compare";
  const auto about = hardware(job.environment, job.placement.device);
  job.console.line(about);
  const auto dataset = load_data(job);
  return Comparison(job, dataset, about).execute();
}

}  // namespace segmentation
