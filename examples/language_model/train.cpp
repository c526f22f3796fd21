#include <algorithm>
#include <chrono>
#include <optional>

#include "header.h"
#include "job.h"
#include "syncnorm/checkpoint.h"
#include "trainer.h"

namespace language_model {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string checkpoint_path(const Options& options) {
  return options.output.folder + "/checkpoint";
}
std::string metrics_path(const Options& options) {
  return options.output.folder + "/metrics.jsonl";
}

nlohmann::json to_json(const Scores& scores) {
  return {{"nats_per_token", scores.nats_per_token},
          {"nats_per_byte", scores.nats_per_byte},
          {"perplexity", scores.perplexity},
          {"byte_perplexity", scores.byte_perplexity},
          {"tokens", scores.tokens},
          {"bytes", scores.bytes}};
}

std::string to_text(const Scores& scores) {
  return format("held out: %.4f nats a token (perplexity %.2f), %.4f a byte", scores.nats_per_token,
                scores.perplexity, scores.nats_per_byte);
}

/// One run from its start or its checkpoint to its end or its interruption.
class Run {
 public:
  Run(Job& job, const Grid& grid, const Tokens& tokens, const std::optional<Header>& saved)
      : job_(job),
        recipe_(job.options.recipe),
        grid_(grid),
        tokens_(tokens),
        trainer_(recipe_, tokens, grid, job.placement.device) {
    if (saved) resume(*saved);
  }

  int execute(const std::string& hardware) {
    describe();
    open_log(hardware);
    start_ = Clock::now();
    const auto first = position_.step;
    while (position_.step < recipe_.steps) {
      const auto report = step();
      show_progress(report, first);
      if (position_.step % job_.options.log_every == 0) log_step(report);
      const bool last = position_.step == recipe_.steps;
      if (!last && position_.step % job_.options.eval_every == 0) validate();
      if (!last && report.stop) return interrupted();
      if (last || position_.step % job_.options.save_every == 0) save();
    }
    return finish();
  }

 private:
  void resume(const Header& saved) {
    if (saved.checksum != tokens_.checksum) {
      throw Failure("the checkpoint in " + job_.options.output.folder +
                    " was trained on other text; give it its own, or start a new run");
    }
    auto state = trainer_.state();
    agree(job_.world(),
          [&] { syncnorm::load_checkpoint(checkpoint_path(job_.options), state, grid_.tensor); });
    position_ = saved.position;
    trainer_.set_steps_taken(position_.step);
    job_.console.line(format("resumed after %ld steps", position_.step));
  }

  StepReport step() {
    const auto begin = Clock::now();
    const auto before = grid_.tensor->counters();
    const auto report = trainer_.step(position_.step);
    meter_.seconds += seconds_since(begin);
    meter_.collectives += grid_.tensor->counters().collectives() - before.collectives();
    meter_.bytes += grid_.tensor->counters().bytes - before.bytes;
    ++meter_.steps;
    ++position_.step;
    ++position_.since_log;
    position_.loss += report.loss;
    return report;
  }

  void describe() {
    job_.console.line(format(
        "%ld layers of %ld, %s %s norm, residual stream %s, %.2f M parameters; %d x %d ranks",
        recipe_.layers, recipe_.hidden, recipe_.placement.c_str(), recipe_.norm.c_str(),
        recipe_.residual.c_str(), static_cast<double>(count_parameters(trainer_.model())) / 1e6,
        grid_.data->size(), grid_.tensor->size()));
  }

  void open_log(const std::string& hardware) {
    agree(job_.world(), [&] {
      if (!job_.is_root()) return;
      if (job_.options.output.resume)
        forget_lines_after(metrics_path(job_.options), "step", position_.step);
      log_.emplace(metrics_path(job_.options));
      log_->write({{"kind", "run"},
                   {"step", position_.step},
                   {"recipe", language_model::to_json(recipe_)},
                   {"tensor_ranks", grid_.tensor->size()},
                   {"data_ranks", grid_.data->size()},
                   {"parameters", count_parameters(trainer_.model())},
                   {"vocabulary", tokens_.tokenizer.size()},
                   {"unigram_nats_per_byte", tokens_.unigram},
                   {"hardware", hardware}});
    });
  }

  void write(const nlohmann::json& line) {
    agree(job_.world(), [&] {
      if (job_.is_root()) log_->write(line);
    });
  }

  void show_progress(const StepReport& report, int64_t first) {
    const auto left = seconds_since(start_) / static_cast<double>(position_.step - first) *
                      static_cast<double>(recipe_.steps - position_.step);
    job_.console.bar(format("step %5ld/%ld", position_.step, recipe_.steps),
                     static_cast<double>(position_.step) / static_cast<double>(recipe_.steps),
                     format("loss %.4f  %s left", report.loss, duration_text(left).c_str()));
  }

  void log_step(const StepReport& report) {
    const double loss = position_.loss / static_cast<double>(position_.since_log);
    const auto steps = static_cast<double>(meter_.steps);
    const double rate =
        steps * static_cast<double>(recipe_.batch * recipe_.context) / meter_.seconds;
    job_.console.line(format("step %5ld/%ld  loss %.4f  lr %.5f  norm %6.3f  %7.0f tokens/s  %s",
                             position_.step, recipe_.steps, loss, report.lr, report.grad_norm, rate,
                             duration_text(seconds_since(start_)).c_str()));
    write({{"kind", "step"},
           {"step", position_.step},
           {"loss", loss},
           {"lr", report.lr},
           {"grad_norm", report.grad_norm},
           {"tokens_per_second", rate},
           {"collectives_per_step", static_cast<double>(meter_.collectives) / steps},
           {"bytes_per_step", static_cast<double>(meter_.bytes) / steps}});
    position_.loss = 0;
    position_.since_log = 0;
    meter_ = {};
  }

  void validate() {
    const auto windows =
        std::min(job_.options.eval_windows, separate_windows(tokens_, recipe_.context));
    const auto scores = trainer_.evaluate(windows);
    job_.console.line(
        format("step %5ld/%ld  %s", position_.step, recipe_.steps, to_text(scores).c_str()));
    write({{"kind", "validation"}, {"step", position_.step}, {"held_out", to_json(scores)}});
  }

  void save() {
    const Header header{language_model::to_json(recipe_), position_, tokens_.checksum,
                        tokens_.tokenizer};
    agree(job_.world(), [&] {
      // The ranks of the other tensor groups hold the same.
      if (grid_.data->rank() != 0) return;
      syncnorm::save_checkpoint(checkpoint_path(job_.options), trainer_.state(), grid_.tensor,
                                to_metadata(header));
    });
  }

  int interrupted() {
    save();
    job_.console.line(
        format("stopped as asked after %ld of %ld steps; nothing is lost. To go on, add: ",
               position_.step, recipe_.steps) +
        "--out " + job_.options.output.folder + " --resume");
    return 0;
  }

  int finish() {
    const auto scores = trainer_.evaluate(separate_windows(tokens_, recipe_.context));
    job_.console.line("all " + to_text(scores) +
                      format("; by token counts alone %.4f", tokens_.unigram));
    write({{"kind", "result"}, {"step", position_.step}, {"held_out", to_json(scores)}});
    const auto& folder = job_.options.output.folder;
    job_.console.line("results in " + folder + "; to have it write: --out " + folder +
                      " --sample PROMPT");
    draw(job_.options.output, LANGUAGE_MODEL_PLOTS, job_.console);
    return 0;
  }

  /// Of the steps since the last line of the log.
  struct Meter {
    double seconds = 0;
    int64_t steps = 0, collectives = 0, bytes = 0;
  };

  Job& job_;
  const Recipe& recipe_;
  const Grid& grid_;
  const Tokens& tokens_;
  Trainer trainer_;
  Position position_;
  std::optional<JsonLines> log_;
  Clock::time_point start_;
  Meter meter_;
};

}  // namespace

int train(Job& job) {
  std::optional<Header> saved;
  agree(job.world(), [&] {
    check_grid(job.options, job.world().size());
    if (job.is_root())
      prepare_folder(job.options.output, "checkpoint",
                     {"checkpoint", "checkpoint.part", "metrics.jsonl", "curves.png"});
    if (!job.options.output.resume) return;
    saved = read_header(checkpoint_path(job.options));
    adopt(job.options, saved->recipe);
    check_grid(job.options, job.world().size());
  });
  // Only rank 0 chose a folder where none was given.
  job.options.output.folder = broadcast_text(job.world(), job.options.output.folder);
  const auto about = hardware(job.environment, job.placement.device);
  job.console.line(about);
  const auto& recipe = job.options.recipe;
  const auto tokens =
      load_tokens(recipe, saved ? std::optional(saved->tokenizer) : std::nullopt, job.world());
  job.console.line(tokens.description);
  const Grid grid(job.placement.comm, job.options.tensor_parallel);
  if (recipe.steps == 0 && !saved)
    job.console.line("--steps 0 without --resume: this evaluates the untrained network");
  return Run(job, grid, tokens, saved).execute(about);
}

}  // namespace language_model
