#include <chrono>
#include <optional>

#include "checkpoint.h"
#include "figures.h"
#include "job.h"
#include "syncnorm/state_dict.h"
#include "trainer.h"

namespace segmentation {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string checkpoint_path(const Options& options) {
  return options.output.folder + "/checkpoint.pt";
}
std::string metrics_path(const Options& options) {
  return options.output.folder + "/metrics.jsonl";
}

const std::vector<std::string> kLeftovers = {"checkpoint.pt",   "metrics.jsonl",    "model.pt",
                                             "predictions.bin", "predictions.json", "curves.png",
                                             "predictions.png"};

/// One run from its start or its checkpoint to its end or its interruption.
class Run {
 public:
  Run(Job& job, const Dataset& dataset, const std::optional<CheckpointHeader>& saved)
      : job_(job),
        recipe_(job.options.recipe),
        dataset_(dataset),
        trainer_(recipe_, dataset, job.placement) {
    if (saved) resume(*saved);
  }

  int execute(const std::string& hardware) {
    open_log(hardware);
    start_ = Clock::now();
    start_epoch_ = epochs_done();
    while (position_.epoch < recipe_.epochs && !trainer_.stopping()) epoch();
    if (trainer_.stopping() && position_.epoch < recipe_.epochs) return interrupted();
    return finish();
  }

 private:
  double epochs_done() const {
    return static_cast<double>(position_.epoch) +
           static_cast<double>(position_.images) / static_cast<double>(dataset_.train.size());
  }

  void resume(const CheckpointHeader& saved) {
    if (saved.checksum != dataset_.checksum()) {
      throw Failure("the checkpoint in " + job_.options.output.folder +
                    " was trained on other data (pictures, size or split differ); give it its own, "
                    "or start a new run");
    }
    agree(job_.world(), [&] {
      load_checkpoint(checkpoint_path(job_.options), trainer_.net(), trainer_.optimizer());
    });
    position_ = saved.position;
    job_.console.line(format("resumed after %.2f epochs", epochs_done()));
  }

  void open_log(const std::string& hardware) {
    agree(job_.world(), [&] {
      if (!job_.is_root()) return;
      if (job_.options.output.resume && recipe_.epochs > 0)
        forget_lines_after(metrics_path(job_.options), "epoch", position_.epoch);
      log_.emplace(metrics_path(job_.options));
      log_->write({{"kind", "run"},
                   {"epoch", position_.epoch},
                   {"recipe", to_json(recipe_)},
                   {"ranks", job_.world().size()},
                   {"hardware", hardware},
                   {"classes", dataset_.class_names},
                   {"colors", dataset_.class_colors}});
    });
  }

  void epoch() {
    const auto begin = Clock::now();
    const auto& counters = job_.placement.comm->counters();
    const auto before = counters.collectives();
    const auto number = position_.epoch + 1;
    const auto already = position_.images;
    StepReport last{};
    trainer_.train_epoch(position_, [&](const StepReport& report) {
      last = report;
      show_progress(report, number,
                    static_cast<double>(report.images - already) / seconds_since(begin));
    });
    if (position_.images > 0) return;  // interrupted

    const double rate = static_cast<double>(last.images - already) / seconds_since(begin);
    const auto collectives = counters.collectives() - before;
    const auto scores = trainer_.test();
    job_.console.line(
        format("epoch %3ld/%ld  loss %.4f  lr %.4f  test mIoU %.4f  Dice %.4f  %5.1f images/s  %s",
               number, recipe_.epochs, last.loss, last.lr, scores.mean_iou, scores.dice, rate,
               duration_text(seconds_since(start_)).c_str()));
    nlohmann::json line = {{"kind", "epoch"},
                           {"epoch", number},
                           {"loss", last.loss},
                           {"lr", last.lr},
                           {"images_per_second", rate},
                           {"seconds", seconds_since(begin)},
                           {"collectives", collectives},
                           {"test", to_json(scores)}};
    agree(job_.world(), [&] {
      if (job_.is_root()) log_->write(line);
    });
    save();
  }

  void show_progress(const StepReport& report, int64_t number, double rate) {
    const auto count = static_cast<double>(dataset_.train.size());
    const double left = (static_cast<double>(recipe_.epochs - number + 1) * count -
                         static_cast<double>(report.images)) /
                        rate;
    job_.console.bar(format("epoch %3ld/%ld", number, recipe_.epochs),
                     static_cast<double>(report.images) / count,
                     format("loss %.4f  %.1f images/s  %s left", report.loss, rate,
                            duration_text(left).c_str()));
  }

  void save() {
    trainer_.share_buffers();
    agree(job_.world(), [&] {
      if (!job_.is_root()) return;
      save_checkpoint(checkpoint_path(job_.options),
                      {to_json(recipe_), position_, dataset_.checksum()}, trainer_.net(),
                      trainer_.optimizer());
    });
  }

  int interrupted() {
    save();
    job_.console.line(
        format("stopped as asked after %.2f of %ld epochs; nothing is lost. To go on, add: ",
               epochs_done(), recipe_.epochs) +
        "--out " + job_.options.output.folder + " --resume");
    return 0;
  }

  int finish() {
    const auto scores = trainer_.test();
    print(scores);
    agree(job_.world(), [&] {
      if (!job_.is_root()) return;
      log_->write({{"kind", "result"}, {"epoch", position_.epoch}, {"test", to_json(scores)}});
      if (recipe_.epochs > 0)
        syncnorm::save_state_dict(*trainer_.net(), job_.options.output.folder + "/model.pt");
      const auto shown = spread(dataset_.test, 6);
      write_predictions(job_.options.output.folder, dataset_, shown, trainer_.predict(shown));
    });
    draw(job_.options.output, SEGMENTATION_PLOTS, job_.console);
    return 0;
  }

  void print(const Scores& scores) {
    job_.console.line(format("%-14s %8s", "test, by class", "IoU"));
    for (int64_t c = 0; c < dataset_.classes(); ++c) {
      job_.console.line(format("%-14s %8.4f", dataset_.class_names[c].c_str(), scores.iou[c]));
    }
    job_.console.line(
        format("mIoU %.4f  Dice %.4f  accuracy %.4f over %zu test pictures; results in %s",
               scores.mean_iou, scores.dice, scores.accuracy, dataset_.test.size(),
               job_.options.output.folder.c_str()));
  }

  Job& job_;
  const Recipe& recipe_;
  const Dataset& dataset_;
  Trainer trainer_;
  Position position_;
  std::optional<JsonLines> log_;
  Clock::time_point start_;
  double start_epoch_ = 0;
};

}  // namespace

int train(Job& job) {
  std::optional<CheckpointHeader> saved;
  agree(job.world(), [&] {
    if (job.is_root()) prepare_folder(job.options.output, "checkpoint.pt", kLeftovers);
    if (!job.options.output.resume) return;
    saved = read_checkpoint_header(checkpoint_path(job.options));
    adopt(job.options, saved->recipe);
  });
  const auto about = hardware(job.environment, job.placement.device);
  job.console.line(about);
  const auto dataset = load_data(job);
  if (job.options.recipe.epochs == 0 && !saved) {
    job.console.line("--epochs 0 without --resume: this evaluates the untrained network");
  }
  return Run(job, dataset, saved).execute(about);
}

}  // namespace segmentation
