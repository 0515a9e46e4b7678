#include "apps/checkpointing.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "apps/resume.h"
#include "apps/run_tokenizer.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/retention.h"

namespace moesaic::apps {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

class Watch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What the system can give without swapping.
std::optional<double> free_host_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (double kib = 0; file >> name >> kib; std::getline(file, unit)) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return std::nullopt;
}

std::string short_time(double seconds) {
  return fmt::format("{:.{}f} s", seconds, seconds < 1 ? 3 : 1);
}

}  // namespace

Checkpointing::Checkpointing(Parts parts) : parts_(std::move(parts)), shared_(*parts_.host) {}

void Checkpointing::finish_interrupted(const std::vector<ConfigChange>& changes) const {
  const config::Config& config = parts_.loaded->config;
  remove_unfinished(checkpoints_of(config));
  const bool new_rule = std::any_of(changes.begin(), changes.end(), [](const ConfigChange& c) {
    return c.key == "checkpoint.keep_last" || c.key == "checkpoint.keep_every";
  });
  if (new_rule) {
    announce_rule();
  } else if (last_saved_ == parts_.trainer->steps_done()) {
    apply_retention(checkpoints_of(config),
                    last_saved_,
                    config.checkpoint.keep_last,
                    config.checkpoint.keep_every);
  }
}

// Early enough to stop the run and set the rule back: nothing is deleted before the run has got on.
void Checkpointing::announce_rule() const {
  const config::CheckpointConfig& rule = parts_.loaded->config.checkpoint;
  std::vector<std::int64_t> steps;
  for (const CheckpointInfo& c : list_checkpoints(checkpoints_of(parts_.loaded->config)))
    steps.push_back(c.step);
  if (steps.empty()) return;
  const std::int64_t next = steps.back() + 1;
  steps.push_back(next);
  auto doomed = steps_to_delete(steps, next, rule.keep_last, rule.keep_every);
  if (doomed.empty()) return;
  constexpr std::size_t kShown = 8;
  const std::size_t shown = std::min(doomed.size(), kShown), more = doomed.size() - shown;
  doomed.erase(doomed.begin() + static_cast<std::ptrdiff_t>(shown), doomed.end());
  parts_.say(fmt::format(
      "retention  by the new rule (checkpoint.keep_last={}, keep_every={}) the next checkpoint "
      "deletes those of steps {}{}",
      rule.keep_last,
      rule.keep_every,
      fmt::join(doomed, ", "),
      more > 0 ? fmt::format(" and {} more", more) : ""));
}

bool Checkpointing::is_new() {
  const std::int64_t step = parts_.trainer->steps_done();
  return std::exchange(last_saved_, step) != step;
}

void Checkpointing::save() {
  if (!is_new()) return;
  if (is_shared()) return save_together(false);
  if (!parts_.loaded->config.checkpoint.async) return write(false);
  if (is_root()) start_background();
}

// Every rank holds a copy of what it writes.
void Checkpointing::save_together(bool must) {
  if (shared_.is_pending()) {
    const Watch watch;
    const std::int64_t step = last_saved_;
    take_result(shared_.wait(), false);
    parts_.say(fmt::format(
        "step {} | save waited {} for the one before", step, short_time(watch.seconds())));
  }
  const bool fits =
      parts_.host->all_reduce_host(std::int64_t{has_memory_for_copy() ? 1 : 0}, ReduceOp::min) == 1;
  const bool in_background = parts_.loaded->config.checkpoint.async && !must && fits;
  shared_.start(request(), parts_.trainer->owned_state(), parts_.trainer->stream(), in_background);
  if (!in_background) take_result(shared_.wait(), must);
}

void Checkpointing::take_result(const SharedSave::Result& result, bool must) {
  shown_.reset();
  seconds_ = result.stall + result.seconds;
  if (!result.error.empty()) return failed({result.step, result.error}, must);
  report(result.step, result.stall, result.seconds, result.bytes);
}

// Only rank 0 holds a copy. The other ranks go on at once; the next step's exchange keeps them together.
void Checkpointing::start_background() {
  if (background_.is_pending()) {
    const Watch watch;
    const bool was_done = background_.is_done();
    const auto failure = take_result();
    if (failure) failed(*failure, false);
    if (!was_done)
      parts_.say(fmt::format(
          "step {} | save waited {} for the one before", last_saved_, short_time(watch.seconds())));
  }
  if (!has_memory_for_copy()) return write_on_root(false);
  const Watch watch;
  background_.start(request(), parts_.trainer->state(), parts_.trainer->stream());
  stall_ = watch.seconds();
}

bool Checkpointing::has_memory_for_copy() {
  const auto needed = static_cast<double>(StateSnapshot::bytes_for(parts_.trainer->owned_state()));
  const auto free = free_host_memory();
  if (background_.holds_memory() || !free || needed < 0.9 * *free) return true;
  if (!std::exchange(said_no_memory_, true))
    parts_.say(fmt::format(
        "checkpoint no room for a copy of the state ({:.1f} GiB; {:.1f} GiB of host memory are "
        "available): training waits while checkpoints are written",
        needed / kGiB,
        *free / kGiB));
  return false;
}

void Checkpointing::look() {
  if (const auto result = shared_.look()) take_result(*result, false);
  if (!background_.is_done()) return;
  if (const auto failure = take_result()) failed(*failure, false);
}

// Reports the save in the background if it succeeded; else returns what went wrong. What it throws is not about the save.
std::optional<Checkpointing::Failure> Checkpointing::take_result() {
  const BackgroundSave::Result result = background_.take_result();
  shown_.reset();
  seconds_ = stall_ + result.seconds;
  if (result.error == nullptr) {
    report(result.step, stall_, result.seconds, checkpoint_bytes(*parts_.trainer));
    return std::nullopt;
  }
  try {
    std::rethrow_exception(result.error);
  } catch (const Error& e) {
    return Failure{result.step, e.what()};
  }
}

std::string Checkpointing::text_of(const Failure& failure) const {
  const bool has_earlier = !list_checkpoints(checkpoints_of(parts_.loaded->config)).empty();
  return fmt::format("the checkpoint of step {} could not be saved: {}. {}",
                     failure.step,
                     failure.what,
                     has_earlier ? "Earlier checkpoints are untouched; the same command continues "
                                   "from the newest."
                                 : "There is no earlier one; the same command starts anew.");
}

// The state of this step is to be saved again.
void Checkpointing::forget(const Failure& failure) {
  if (last_saved_ == failure.step) last_saved_ = -1;
  lost_ = failure;
  parts_.event("save_failed", failure.step, {});
}

void Checkpointing::failed(const Failure& failure, bool must) {
  const bool stops = must || parts_.loaded->config.checkpoint.on_error == config::OnSaveError::stop;
  try {
    forget(failure);
  } catch (const ResourceError&) {
    if (!stops) throw;  // else the save's own error, which came first, is the one to show
  }
  if (stops) throw ResourceError(text_of(failure));
  const bool goes_on = parts_.trainer->steps_done() < parts_.loaded->config.train.steps;
  parts_.say(fmt::format("step {} | save failed{}: {}",
                         failure.step,
                         goes_on ? ", training goes on (checkpoint.on_error)" : "",
                         failure.what));
}

// A save is to follow at once, of a state at least as new: whether that fails is what counts.
void Checkpointing::make_up_for(const Failure& failure) {
  shown_.reset();
  forget(failure);
  parts_.say(fmt::format("the checkpoint of step {} could not be saved: {}. Saving step {} now.",
                         failure.step,
                         failure.what,
                         parts_.trainer->steps_done()));
}

void Checkpointing::finish() {
  if (is_shared()) {
    if (shared_.is_pending()) {
      const SharedSave::Result result = shared_.wait();
      if (result.error.empty())
        take_result(result, false);
      else
        make_up_for({result.step, result.error});
    }
    if (is_new()) save_together(true);
    return;
  }
  if (is_root() && background_.is_pending()) {
    if (const auto failure = take_result()) make_up_for(*failure);
  }
  // All ranks must agree whether the last step is still to be saved.
  std::string saved = std::to_string(last_saved_);
  parts_.host->broadcast_host(saved, 0);
  last_saved_ = std::stoll(saved);
  if (is_new()) write(true);
}

void Checkpointing::settle() {
  if (shared_.is_pending()) take_result(shared_.wait(), false);
  if (background_.is_pending()) {
    if (const auto failure = take_result()) failed(*failure, false);
  }
  if (lost_) throw ResourceError(text_of(*lost_));
}

void Checkpointing::drain() noexcept {
  try {
    if (!background_.is_pending()) return;
    if (const auto failure = take_result()) failed(*failure, false);
  } catch (const std::exception& e) {  // another error is on its way already
    parts_.say(e.what());
  }
}

// All ranks end alike: with rank 0's message, if writing failed.
void Checkpointing::write(bool must) {
  std::string failure;
  if (is_root()) {
    try {
      write_on_root(must);
    } catch (const ResourceError& e) {
      failure = e.what();
    }
  }
  parts_.host->broadcast_host(failure, 0);
  if (!failure.empty()) throw ResourceError(failure);
}

void Checkpointing::write_on_root(bool must) {
  Trainer& trainer = *parts_.trainer;
  const SaveRequest r = request();
  const Watch watch;
  try {
    save_checkpoint(r.checkpoints,
                    r.step,
                    trainer.state(),
                    r.values,
                    r.config_yaml,
                    r.keep_last,
                    r.keep_every,
                    trainer.stream(),
                    r.max_file_bytes,
                    r.progress);
    shown_.reset();
  } catch (const Error& e) {
    shown_.reset();
    return failed({r.step, e.what()}, must);
  }
  seconds_ = watch.seconds();
  report(r.step, seconds_, seconds_, checkpoint_bytes(*parts_.trainer));
}

void Checkpointing::report(std::int64_t step, double stall, double seconds, double bytes) {
  lost_.reset();
  parts_.event("save", step, {{"stall_seconds", stall}, {"seconds", seconds}, {"bytes", bytes}});
  parts_.say(fmt::format("step {} | save {} | {} stall, written in {}{}",
                         step,
                         checkpoints_of(parts_.loaded->config).string(),
                         short_time(stall),
                         short_time(seconds),
                         amount_and_rate(bytes, seconds)));
}

// Begins to show the save.
SaveRequest Checkpointing::request() {
  const config::Config& config = parts_.loaded->config;
  StateValues values = parts_.trainer->values();
  if (!origin_.empty()) values.texts[kOriginValue] = origin_;
  if (!tokenizer_.empty()) values.texts[kTokenizerValue] = tokenizer_;
  const std::int64_t step = parts_.trainer->steps_done();
  shown_ = std::make_unique<ShownProgress>(
      *parts_.sinks, fmt::format("saving step {}", step), 0, "bytes");
  return {.checkpoints = checkpoints_of(config),
          .step = step,
          .values = std::move(values),
          .config_yaml = config::effective_yaml(*parts_.loaded),
          .keep_last = config.checkpoint.keep_last,
          .keep_every = config.checkpoint.keep_every,
          .progress = counting(**shown_)};
}

ByteProgress counting(Progress& progress) {
  return {.total =
              [&progress](std::uint64_t n) {
                progress.set_total(progress.done() + static_cast<std::int64_t>(n));
              },
          .more = [&progress](std::uint64_t n) { progress.add(static_cast<std::int64_t>(n)); }};
}

std::string amount_and_rate(double bytes, double seconds) {
  if (seconds < 1) return {};
  return fmt::format(" | {:.2f} GiB, {:.2f} GiB/s", bytes / kGiB, bytes / kGiB / seconds);
}

std::filesystem::path checkpoints_of(const config::Config& config) {
  return std::filesystem::path(config.run.dir) / "checkpoints";
}

double checkpoint_bytes(const Trainer& trainer) {
  double bytes = 0;
  for (const StateTensor& t : trainer.owned_state())
    bytes += static_cast<double>(t.bytes());
  return bytes;
}

}  // namespace moesaic::apps
