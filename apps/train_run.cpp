#include "apps/train_run.h"

#include <algorithm>
#include <chrono>
#include <fstream>

#include <fmt/format.h>

#include "apps/config_changes.h"
#include "comm/device_communicator.h"
#include "core/checkpoint/checkpoint.h"
#include "core/model/from_config.h"
#include "core/train/step_trace.h"
#include "kernels/cuda_handles.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw ResourceError(fmt::format("{}: could not be written", path.string()));
}

}  // namespace

TrainRun::TrainRun(const config::LoadedConfig& loaded,
                   Resume resume,
                   const RankPlace& place,
                   const ConsoleStyle& console)
    : loaded_(loaded),
      resume_(resume),
      place_(place),
      host_(place.world),
      report_(loaded, place.world, console) {}
TrainRun::~TrainRun() = default;

std::filesystem::path TrainRun::checkpoints() const {
  return std::filesystem::path(config().run.dir) / "checkpoints";
}

void TrainRun::prepare() {
  check_trainable(config());
  const Device device = resolve_device(config(), place_.local_rank, place_.local_size);
  train_ = open_tokens(config().data.train, config());
  if (!config().data.valid.empty()) valid_ = open_tokens(config().data.valid, config());
  if (device.kind == Device::Kind::cuda) {
    std::vector<data::DocumentBound> documents{data::DocumentBound(*train_)};
    if (valid_) documents.emplace_back(*valid_);
    const auto before = cuda::device_memory(device);
    memory_before_ = before.total - before.free;
    memory_plan_ =
        plan_memory(config(), device, precision_of(config(), true), documents, host_.size());
    check_memory();
    if (host_.size() > 1)
      device_world_ = make_device_communicator(host_, device, device_comm_options(config()));
  }
  const ShownProgress progress(report_.sinks(), "building model and initial values");
  assembly_ = assemble(config(), true, device);
  trainer_ = std::make_unique<Trainer>(
      Trainer::Parts{.config = &config(),
                     .world = device_world_ ? device_world_.get() : &host_,
                     .params = assembly_.params.get(),
                     .model = assembly_.model.get(),
                     .optimizer = assembly_.optimizer.get(),
                     .train = train_,
                     .valid = valid_,
                     .device = assembly_.device,
                     .recompute = recompute_policy(config().activations),
                     .stream_mode = config().debug.immediate_streams ? Stream::Mode::immediate
                                                                     : Stream::Mode::worker});
}

// A run that does not fit says so before it starts anything.
void TrainRun::check_memory() const {
  const auto memory = cuda::device_memory(memory_plan_->device);
  // The context is there already.
  if (memory_plan_->total() - memory_plan_->runtime <= memory.free) return;
  throw ResourceError(fmt::format(
      "this run needs {:.1f} GiB on {} ({}), which has {:.1f} of {:.1f} GiB free:\n{}Use more "
      "GPUs, "
      "a smaller train.micro_batch_size or data.sequence_length, or activations.recompute=[full].",
      static_cast<double>(memory_plan_->total()) / kGiB,
      to_string(memory_plan_->device),
      cuda::device_name(memory_plan_->device),
      static_cast<double>(memory.free) / kGiB,
      static_cast<double>(memory.total) / kGiB,
      memory_plan_->table()));
}

// After resuming was settled: a run that is refused leaves the folder as it was.
void TrainRun::open_run_dir() {
  if (is_root()) {
    write_text(std::filesystem::path(config().run.dir) / "config.yaml",
               config::effective_yaml(loaded_));
  }
  host_.barrier();
}

bool TrainRun::out_of_time() {
  const auto limit = config().run.max_minutes;
  if (!limit) return false;
  const double minutes =
      std::chrono::duration<double, std::ratio<60>>(std::chrono::steady_clock::now() - start_)
          .count();
  // The ranks' clocks differ: all stop when one must.
  return host_.all_reduce_host(static_cast<std::int64_t>(minutes >= *limit ? 1 : 0),
                               ReduceOp::max) != 0;
}

void TrainRun::continue_from_checkpoint() {
  // One rank looks, so that all continue from the same step whatever a shared file system shows them.
  std::string found;
  if (is_root()) {
    if (const auto latest = latest_checkpoint(checkpoints())) found = latest->path.string();
  }
  host_.broadcast_host(found, 0);
  if (found.empty()) {
    if (resume_ == Resume::must)
      throw InputError(fmt::format("--resume=must, but {} holds no complete checkpoint",
                                   checkpoints().string()));
    return;
  }
  if (resume_ == Resume::never) {
    throw UsageError(
        fmt::format("--resume=never, but {} already holds {}; choose another run.dir, remove the "
                    "checkpoints, or use --resume=auto",
                    checkpoints().string(),
                    std::filesystem::path(found).filename().string()));
  }
  report_changes(found);
  const ShownProgress progress(report_.sinks(), "load");
  const auto tensors = trainer_->state();
  trainer_->load_values(load_checkpoint(found, tensors, true, trainer_->stream()));
  last_saved_ = trainer_->steps_done();
  if (trainer_->steps_done() > config().train.steps) {
    throw UsageError(fmt::format(
        "{} is at step {}, beyond train.steps ({}); raise train.steps, or choose another run.dir",
        found,
        trainer_->steps_done(),
        config().train.steps));
  }
  continued_from_ = found;
  report_.line(fmt::format("continuing from {} (step {})", found, trainer_->steps_done()));
}

// Another model cannot continue these weights; every other change is shown, old and new.
void TrainRun::report_changes(const std::string& checkpoint) {
  std::string refused;
  for (const ConfigChange& c :
       config_changes(checkpoint_config(checkpoint), config::effective_yaml(loaded_))) {
    const std::string line = fmt::format("{}: {} -> {}", c.key, c.before, c.after);
    if (c.key.rfind("model.", 0) == 0) {
      refused += "\n  " + line;
    } else {
      report_.line("changed    " + line);
    }
  }
  if (!refused.empty()) {
    throw UsageError(fmt::format(
        "{} was trained as another model; set these keys back, or start anew in another run.dir:{}",
        checkpoint,
        refused));
  }
}

// Two runs in one folder would destroy each other's files. The lock ends with the process, however it ends.
void TrainRun::lock_run_dir() {
  if (!is_root()) return;
  const std::filesystem::path dir(config().run.dir);
  if (std::filesystem::exists(dir) && !std::filesystem::is_directory(dir))
    throw UsageError(fmt::format("run.dir: {} is not a folder", dir.string()));
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error)
    throw ResourceError(
        fmt::format("run.dir: {} could not be made: {}", dir.string(), error.message()));
  lock_ = std::make_unique<FileLock>(dir / ".lock");
}

// The plan beside the driver's count, which includes other processes on the device: what they had before this one began
// is taken off.
std::string TrainRun::memory_line() const {
  const auto driver = cuda::device_memory(assembly_.device);
  const auto grown = static_cast<double>(driver.total - driver.free) -
                     static_cast<double>(memory_before_),
             planned = static_cast<double>(memory_plan_->total() - memory_plan_->runtime);
  return fmt::format(
      "planned {:.2f} GiB; as the driver counts {:.2f} GiB ({:+.1f} %) + {:.2f} GiB for the CUDA "
      "context and other processes, of {:.1f} GiB",
      planned / kGiB,
      grown / kGiB,
      100 * (grown / planned - 1),
      static_cast<double>(memory_before_) / kGiB,
      static_cast<double>(driver.total) / kGiB);
}

void TrainRun::begin_report() {
  report_.begin({.loaded = loaded_,
                 .assembly = assembly_,
                 .host = host_,
                 .train = *train_,
                 .valid = valid_.get(),
                 .device_line = memory_plan_ ? memory_line() : "",
                 .uses_nccl = device_world_ != nullptr,
                 .mpi_version = place_.mpi_version,
                 .steps_done = trainer_->steps_done(),
                 .checkpoint = continued_from_});
}

void TrainRun::save() {
  if (last_saved_ == trainer_->steps_done()) return;
  last_saved_ = trainer_->steps_done();
  if (is_root()) {
    const ShownProgress progress(report_.sinks(), "save");
    const auto from = std::chrono::steady_clock::now();
    const auto tensors = trainer_->state();
    std::size_t bytes = 0;
    for (const auto& tensor : tensors)
      bytes += tensor.bytes();
    save_checkpoint(checkpoints(),
                    last_saved_,
                    tensors,
                    trainer_->values(),
                    config::effective_yaml(loaded_),
                    config().checkpoint.keep_last,
                    config().checkpoint.keep_every,
                    trainer_->stream());
    report_.event(
        {.type = "save",
         .step = last_saved_,
         .values =
             {{"bytes", static_cast<double>(bytes)},
              {"seconds",
               std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count()}},
         .texts = {{"path", checkpoints().string()}},
         .line = fmt::format("save {}", checkpoints().string())});
  }
  host_.barrier();
}

double TrainRun::evaluate(bool whole) {
  ShownProgress progress(report_.sinks(), whole ? "final evaluation" : "evaluation", 0, "batches");
  const EvalStats stats = trainer_->evaluate(whole, &*progress);
  report_.eval(stats, trainer_->steps_done());
  return stats.loss;
}

// A traced step is watched by the trace alone.
StepStats TrainRun::next_step() {
  const std::int64_t step = trainer_->steps_done() + 1;
  const auto& traced = config().log.trace_steps;
  if (std::find(traced.begin(), traced.end(), step) == traced.end()) return trainer_->step();
  StepTrace trace(trainer_->stream());
  trainer_->observe(&trace);
  trainer_->observe_paths(&trace);
  const StepStats stats = trainer_->step();
  trainer_->observe(nvtx_.get());
  trainer_->observe_paths(nullptr);
  const int rank = host_.rank();
  const auto path = fmt::format("{}/trace/step-{:08}.rank{}.json", config().run.dir, step, rank);
  trace.write(path, rank);
  report_.event(
      {.type = "trace", .step = step, .texts = {{"path", path}}, .line = "trace " + path});
  return stats;
}

void TrainRun::mark_ranges() {
  if (!config().debug.nvtx) return;
  if (trainer_->stream().device().kind != Device::Kind::cuda)
    throw UsageError("debug.nvtx: ranges for a profiler need run.device=cuda");
  nvtx_ = cuda::create_nvtx_observer();
  trainer_->observe(nvtx_.get());
}

// An error ends the run's records, too.
int TrainRun::execute() {
  try {
    return train();
  } catch (const Error& e) {
    if (trainer_)
      report_.end({trainer_->steps_done(), static_cast<int>(e.exit_code()), e.what(), ""});
    throw;
  }
}

int TrainRun::train() {
  prepare();
  mark_ranges();
  lock_run_dir();
  continue_from_checkpoint();
  open_run_dir();
  begin_report();
  const auto& train = config().train;
  const auto& checkpoint = config().checkpoint;
  while (trainer_->steps_done() < train.steps) {
    const StepStats stats = next_step();
    report_.step(stats, *trainer_, memory_plan_ ? " | " + memory_line() : "");
    const std::int64_t step = trainer_->steps_done();
    if (trainer_->consecutive_bad_steps() >= train.max_bad_steps) {
      throw NumericsError(
          fmt::format("{} steps in a row had a loss or gradient norm that was not finite, the last "
                      "one step {}; none of them was saved. "
                      "Lower optimizer.lr, or look at the data of steps {} to {}.",
                      train.max_bad_steps,
                      step,
                      step - train.max_bad_steps + 1,
                      step));
    }
    if (valid_ && train.eval_every > 0 && step % train.eval_every == 0 && step < train.steps)
      evaluate(false);
    // A state that only skips must not push good checkpoints out.
    if (checkpoint.every > 0 && step % checkpoint.every == 0 &&
        trainer_->consecutive_bad_steps() == 0)
      save();
    if (step < train.steps && out_of_time()) {
      save();
      constexpr int kCode = static_cast<int>(ExitCode::requeue);
      report_.end({step,
                   kCode,
                   "run.max_minutes is over",
                   fmt::format("stopped    run.max_minutes is over at step {} of {}; the same "
                               "command continues (exit code {})",
                               step,
                               train.steps,
                               kCode)});
      return kCode;
    }
  }
  if (const std::int64_t bad = trainer_->consecutive_bad_steps(); bad > 0) {
    throw NumericsError(fmt::format(
        "the last {} step(s) were not finite; nothing was saved after step {}. Lower optimizer.lr.",
        bad,
        train.steps - bad));
  }
  if (checkpoint.save_at_end) save();
  if (valid_) report_.closing_comparison(evaluate(true), *valid_);
  report_.end({trainer_->steps_done(),
               0,
               "finished",
               fmt::format("finished   step {} of {} | {} tokens | {} skipped step(s)",
                           trainer_->steps_done(),
                           train.steps,
                           trainer_->tokens_seen(),
                           trainer_->skipped_steps())});
  return 0;
}

}  // namespace moesaic::apps
