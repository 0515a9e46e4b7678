#include "apps/train_run.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>
#include <unistd.h>

#include "apps/data_lines.h"
#include "apps/doctor/start_warnings.h"
#include "apps/finished_mark.h"
#include "apps/host_memory.h"
#include "apps/memory_shortages.h"
#include "apps/rank_agreement.h"
#include "apps/run_tokenizer.h"
#include "apps/version.h"
#include "comm/device_communicator.h"
#include "core/base/durable_file.h"
#include "core/checkpoint/checkpoint.h"
#include "core/model/from_config.h"
#include "core/train/step_trace.h"
#include "kernels/cuda_handles.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

}  // namespace

TrainRun::TrainRun(const config::LoadedConfig& loaded,
                   ResumeChoice resume,
                   const RankPlace& place,
                   Watchdog* watchdog,
                   const ConsoleStyle& console)
    : loaded_(loaded),
      resume_(std::move(resume)),
      place_(place),
      watchdog_(watchdog),
      host_(place.world),
      report_(loaded, place.world, console) {}
TrainRun::~TrainRun() = default;

void TrainRun::prepare() {
  check_trainable(config());
  MeshLayout(mesh_config(config().parallel), host_.size());  // throws before anything is opened
  const Device device = resolve_device(config(), &host_);
  if (place_.local_size > 1) {
    const std::string warning =
        doctor::shared_memory_warning(place_.local_size, device.kind == Device::Kind::cuda);
    if (!warning.empty()) report_.line("warning    " + warning);
  }
  const auto configured = tokenizer_of_config(config());
  train_ = open_training_data(config(), configured);
  if (!config().data.valid.empty()) valid_ = open_tokens(config().data.valid, config(), configured);
  std::vector<const data::TokenSource*> sources = train_.sources();
  if (valid_) sources.push_back(valid_.get());
  require_same_data(host_, sources);
  const auto tokenizer = tokenizer_of_data(configured, sources);
  tokenizer_hash_ = tokenizer ? tokenizer->content_hash() : kUnknownTokenizer;
  plan_and_check_memory(device);
  if (device.kind == Device::Kind::cuda && host_.size() > 1)
    device_world_ = make_device_communicator(host_, device, device_comm_options(config()));
  mesh_ = std::make_unique<Mesh>(mesh_config(config().parallel),
                                 device_world_ ? *device_world_ : host_);
  assembly_ = assemble(
      config(), true, device, mesh_->position(), memory_plan_ ? memory_plan_->tiers : std::nullopt);
  trainer_ = std::make_unique<Trainer>(
      Trainer::Parts{.config = &config(),
                     .mesh = mesh_.get(),
                     .ranks_per_node = ranks_per_node(config(), place_),
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

// All ranks hear of the one that lacks most, so that one correction is enough.
void TrainRun::plan_and_check_memory(Device device) {
  Shortage mine;
  try {
    plan_memory_of_rank(device);
  } catch (const MemoryShortage& e) {
    mine = e;
  }
  std::vector<Shortage> all;
  for (const std::string& text : host_.all_gather_host(packed(mine)))
    all.push_back(unpacked_shortage(text));
  const auto who = [&](int rank) {
    const auto stages = static_cast<int>(config().parallel.pp);
    return stages == 1 ? fmt::format("rank {}", rank)
                       : fmt::format("rank {} (stage {})", rank, rank / (host_.size() / stages));
  };
  if (const Shortage most = largest(all, who)) throw *most;
}

// On a GPU, and where something is promised or refused by the plan.
void TrainRun::plan_memory_of_rank(Device device) {
  const bool on_gpu = device.kind == Device::Kind::cuda;
  const bool offloads_experts = config().experts.offload != config::ExpertOffload::none;
  const auto& activations = config().activations;
  const bool offloads =
      offloads_experts || activations.residual_offload || !activations.offload.empty();
  if (!on_gpu && !offloads && !config().memory.device_budget) return;
  std::vector<data::DocumentBound> documents{train_.document_bound()};
  if (valid_) documents.emplace_back(*valid_);
  MemoryLimits limits;
  if (on_gpu) {
    device_use_.emplace(device);
    limits.device_free = cuda::device_memory(device).free;
  }
  if (offloads && !config().memory.host_budget) {
    if (const auto available = available_host_memory())
      limits.host = *available / static_cast<std::uint64_t>(std::max(1, place_.local_size));
    host_.barrier();  // all have looked before one takes
  }
  memory_plan_ = plan_memory(config(),
                             device,
                             precision_of(config(), on_gpu),
                             documents,
                             host_.size(),
                             host_.rank(),
                             limits);
  check_budget();
  if (on_gpu) check_memory();
}

void TrainRun::check_budget() const {
  const auto& budget = config().memory.device_budget;
  if (!budget || memory_plan_->total() <= static_cast<std::size_t>(*budget)) return;
  throw MemoryShortage(
      MemoryShortage::Where::device,
      memory_plan_->total(),
      fmt::format("memory.device_budget is {} bytes, and this run needs {} of device "
                  "memory:\n{}Raise it, or use "
                  "a smaller train.micro_batch_size or data.sequence_length, "
                  "activations.recompute=[full], activations.piece_tokens, more "
                  "ranks, or experts.offload.",
                  *budget,
                  memory_plan_->total(),
                  memory_plan_->table()));
}

// A run that does not fit says so before it starts anything.
void TrainRun::check_memory() const {
  const auto memory = cuda::device_memory(memory_plan_->device);
  // The context is there already.
  if (memory_plan_->total() - memory_plan_->runtime <= memory.free) return;
  throw MemoryShortage(
      MemoryShortage::Where::device,
      memory_plan_->total(),
      fmt::format(
          "this run needs {:.1f} GiB on {} ({}), which has {:.1f} of {:.1f} GiB free:\n{}Use more "
          "GPUs, "
          "a smaller train.micro_batch_size or data.sequence_length, "
          "activations.recompute=[full], or activations.piece_tokens.",
          static_cast<double>(memory_plan_->total()) / kGiB,
          to_string(memory_plan_->device),
          cuda::device_name(memory_plan_->device),
          static_cast<double>(memory.free) / kGiB,
          static_cast<double>(memory.total) / kGiB,
          memory_plan_->table()));
}

// After resuming was settled: a run that is refused leaves the folder as it was.
void TrainRun::open_run_dir(const std::vector<ConfigChange>& changes) {
  if (is_root()) {
    remove_finished_mark(config().run.dir);
    if (stops_->remove_older_file())
      report_.line(
          fmt::format("removed    {}: it was there before this start, and does not stop it",
                      (std::filesystem::path(config().run.dir) / "stop").string()));
    replace_file(std::filesystem::path(config().run.dir) / "config.yaml",
                 config::effective_yaml(loaded_));
    keep_tokenizer(config());
    checkpointing_->finish_interrupted(changes);
  }
  host_.barrier();
}

// Where the watchdogs of all ranks tell each other where they are. The lock has made the folder above.
void TrainRun::meet_on_board() {
  if (watchdog_ == nullptr || host_.size() == 1) return;
  const auto folder = std::filesystem::path(config().run.dir) / "watchdog";
  std::string life;
  if (is_root()) {
    std::error_code error;  // a run needs no board
    std::filesystem::remove_all(folder, error);
    std::filesystem::create_directories(folder, error);
    life =
        fmt::format("{}-{}", std::chrono::system_clock::now().time_since_epoch().count(), getpid());
  }
  host_.broadcast_host(life, 0);
  watchdog_->use_board(folder, life, host_.rank(), host_.size());
}

// The plan beside the driver's count.
std::string TrainRun::memory_text() {
  if (!device_use_) return "";
  device_use_->look();
  return device_use_->line(*memory_plan_);
}

void TrainRun::begin_report() {
  report_.begin(
      {.loaded = loaded_,
       .assembly = assembly_,
       .host = host_,
       .train = train_,
       .valid = valid_.get(),
       .memory = memory_plan_ ? &*memory_plan_ : nullptr,
       .device_line = memory_text(),
       .uses_nccl = device_world_ != nullptr,
       .ranks_per_node = ranks_per_node(config(), place_),
       .mpi_version = place_.mpi_version,
       .peak = device_peak(
           config().log.peak_tflops,
           assembly_.device.kind == Device::Kind::cuda ? cuda::device_name(assembly_.device) : "",
           assembly_.precision.compute),
       .steps_done = trainer_->steps_done(),
       .continues = continues_,
       .checkpoint = continued_from_});
}

double TrainRun::evaluate(bool whole) {
  const PeriodScope period("evaluation", false);
  ShownProgress progress(report_.sinks(), whole ? "final evaluation" : "evaluation", 0, "batches");
  const EvalStats stats = trainer_->evaluate(whole, &*progress);
  report_.eval(stats, trainer_->steps_done());
  return stats.loss;
}

// All ranks agree whether there is another step, and if not, why.
std::optional<StepStats> TrainRun::next_step(StopReason& stop) {
  const bool first = !std::exchange(has_stepped_, true);
  const PeriodScope period("training", first);
  report_.begin_step();
  if (touches_) touches_->forget();
  auto wish = static_cast<std::int64_t>(stops_->wish());
  const auto stats = traced_step(wish);
  stop = static_cast<StopReason>(wish);
  if (!stats) return stats;
  if (touches_) touches_->end_step(stats->step);
  stops_->step_took(stats->seconds);
  if (watchdog_ != nullptr && !first) watchdog_->step_took(stats->seconds);
  return stats;
}

// A traced step is watched by the trace alone.
std::optional<StepStats> TrainRun::traced_step(std::int64_t& stop_wish) {
  const std::int64_t step = trainer_->steps_done() + 1;
  const auto& traced = config().log.trace_steps;
  if (std::find(traced.begin(), traced.end(), step) == traced.end())
    return trainer_->step_unless_stopped(stop_wish);
  StepTrace trace(trainer_->stream());
  trainer_->observe(&trace);
  trainer_->observe_paths(&trace);
  const auto stats = trainer_->step_unless_stopped(stop_wish);
  trainer_->observe(nvtx_.get());
  trainer_->observe_paths(nullptr);
  if (!stats) return stats;
  const int rank = host_.rank();
  const auto path = fmt::format("{}/trace/step-{:08}.rank{}.json", config().run.dir, step, rank);
  trace.write(path, rank);
  report_.event(
      {.type = "trace", .step = step, .texts = {{"path", path}}, .line = "trace " + path});
  return stats;
}

bool TrainRun::is_lazy() const {
  return assembly_.optimizer->options().lazy_untouched &&
         ExpertUpdates::can_run_beside(*assembly_.params, *assembly_.optimizer);
}

// Of no harm, but not what was meant.
void TrainRun::warn_of_dense_updates() {
  const bool is_full = config().experts.offload == config::ExpertOffload::full;
  const bool has_experts = assembly_.params->tiers() != nullptr || !is_full;  // of this stage
  if (!is_root() || config().optimizer.untouched != config::Untouched::lazy || !has_experts ||
      is_lazy())
    return;
  report_.line(fmt::format(
      "warning    optimizer.untouched: lazy does what dense does here: {}",
      is_full ? "ranks that hold the same experts, or slices of them for Muon, update them "
                "together"
              : "it takes experts.offload=full for an update to wait"));
}

// Of this life, on rank 0.
void TrainRun::log_touches() {
  ExpertTiers* tiers = assembly_.params->tiers();
  if (!config().experts.touch_log || !is_root()) return;
  if (tiers == nullptr)
    return report_.line(
        "warning    experts.touch_log: rank 0's stage of the pipeline has no experts, so nothing "
        "is written");
  const bool all = !assembly_.optimizer->options().skip_untouched && !is_lazy();
  touches_.emplace(*tiers,
                   std::filesystem::path(config().run.dir) / *config().experts.touch_log,
                   all ? tiers::Updates::dense : tiers::Updates::touched);
}

void TrainRun::mark_ranges() {
  if (!config().debug.nvtx) return;
  if (trainer_->stream().device().kind != Device::Kind::cuda)
    throw UsageError("debug.nvtx: ranges for a profiler need run.device=cuda");
  nvtx_ = cuda::create_nvtx_observer();
  trainer_->observe(nvtx_.get());
}

void TrainRun::prepare_saving() {
  checkpointing_ = std::make_unique<Checkpointing>(
      Checkpointing::Parts{.loaded = &loaded_,
                           .host = &host_,
                           .trainer = trainer_.get(),
                           .say = [this](const std::string& line) { report_.line(line); },
                           .event =
                               [this](const std::string& type,
                                      std::int64_t step,
                                      const std::map<std::string, double>& values) {
                                 report_.event({.type = type, .step = step, .values = values});
                               },
                           .sinks = &report_.sinks()});
  constexpr double kGuessedBytesPerSecond = 100e6;
  stops_ = std::make_unique<StopRequests>(StopRequests::Settings{
      .file = is_root() ? std::filesystem::path(config().run.dir) / "stop" : "",
      .max_minutes = config().run.max_minutes,
      .start = start_,
      .job_end = job_end_of_environment(),
      .expected_save_seconds = checkpoint_bytes(*trainer_) / kGuessedBytesPerSecond});
}

// From the checkpoint to continue from, else from the weights to start with; returns changed keys.
std::vector<ConfigChange> TrainRun::load_state() {
  const PeriodScope period("loading", true);
  ShownProgress progress(report_.sinks(), "loading", 0, "bytes");
  const ResumeParts parts{.loaded = &loaded_,
                          .choice = resume_,
                          .tokenizer = tokenizer_hash_,
                          .host = &host_,
                          .trainer = trainer_.get(),
                          .say = [this](const std::string& line) { report_.line(line); },
                          .progress = &*progress};
  const Continued continued = continue_run(parts);
  continues_ = continued.yes;
  continued_from_ = continued.origin;
  checkpointing_->set_origin(continued.origin);
  checkpointing_->set_tokenizer(tokenizer_hash_);
  if (continued.is_own) checkpointing_->is_saved();
  if (!continued.yes && config().checkpoint.load_weights) load_start_weights(parts);
  return continued.changes;
}

// On a disk that takes no more this fails as well; what ended the run is the error to show.
void TrainRun::report_failure(const Error& error) {
  try {
    report_.end({trainer_->steps_done(), static_cast<int>(error.exit_code()), error.what(), ""});
  } catch (const Error&) {  // nothing more can be done for the records
  }
}

// An error ends the run's records, too.
int TrainRun::execute() {
  try {
    return run();
  } catch (const Error& e) {
    if (trainer_) report_failure(e);
    throw;
  }
}

void TrainRun::take_lock() {
  if (is_root() && !lock_) lock_ = lock_run_dir(config().run.dir);
}

// A run that another life brought to its end is not built again; the last elements of a job array are such starts.
FinishedRun TrainRun::finished_before() {
  // Where there is no mark the folder stays as it is until the configuration and the data have been found good.
  if (is_root() && is_marked_finished(config().run.dir, config().train.steps)) take_lock();
  return finished_run({.loaded = &loaded_,
                       .choice = resume_,
                       .host = &host_,
                       .say = [this](const std::string& line) { report_.line(line); }});
}

int TrainRun::end_finished(const FinishedRun& finished) {
  report_.line(
      fmt::format("finished   step {} of {} was done before, nothing is left to do ({}); raise "
                  "train.steps to train on",
                  config().train.steps,
                  config().train.steps,
                  finished.checkpoint.string()));
  return 0;
}

int TrainRun::run() {
  const FinishedRun finished = finished_before();
  if (finished.is_checked) return end_finished(finished);
  prepare();
  mark_ranges();
  take_lock();
  if (host_.size() > 1 && trainer_->is_split()) require_one_folder(host_, config().run.dir);
  meet_on_board();
  prepare_saving();
  const std::vector<ConfigChange> changes = load_state();
  if (!finished.checkpoint.empty()) return end_finished(finished);  // and all of it is right
  open_run_dir(changes);
  begin_report();
  log_touches();
  warn_of_dense_updates();
  for (const ConfigChange& c : changes) {
    report_.event({.type = "changed",
                   .step = trainer_->steps_done(),
                   .texts = {{"key", c.key}, {"before", c.before}, {"after", c.after}}});
  }
  try {
    return train();
  } catch (...) {
    checkpointing_->drain();
    throw;
  }
}

void TrainRun::report_data_use() {
  if (!is_root()) return;
  for (const RunEvent& event : data_use_events(trainer_->data_use(), trainer_->steps_done()))
    report_.event(event);
}

int TrainRun::train() {
  const PeriodScope period("between steps", false);
  const auto& train = config().train;
  while (trainer_->steps_done() < train.steps) {
    count_saving([this] { look_at_saves(); });
    StopReason stop = StopReason::none;
    auto stats = next_step(stop);
    if (!stats) return stop_early(stop);
    stats->parts[StepPart::checkpoint] = std::exchange(saving_seconds_, 0);
    const std::string memory = memory_text();
    report_.step(*stats, *trainer_, memory.empty() ? "" : " | " + memory);
    refuse_bad_numbers();
    const std::int64_t step = trainer_->steps_done();
    if (valid_ && train.eval_every > 0 && step % train.eval_every == 0 && step < train.steps)
      evaluate(false);
    const std::int64_t every = config().checkpoint.every;
    // A state that only skips must not push good checkpoints out.
    if (every > 0 && step % every == 0 && trainer_->consecutive_bad_steps() == 0) {
      const PeriodScope saving("saving", true);
      count_saving([this] { checkpointing_->save(); });
    }
  }
  if (const std::int64_t bad = trainer_->consecutive_bad_steps(); bad > 0) {
    throw NumericsError(fmt::format(
        "the last {} step(s) were not finite; nothing was saved after step {}. Lower optimizer.lr.",
        bad,
        train.steps - bad));
  }
  finish();
  return 0;
}

void TrainRun::finish() {
  if (config().checkpoint.save_at_end) {
    finish_saving();
  } else {
    checkpointing_->settle();
  }
  report_data_use();
  if (valid_) report_.closing_comparison(evaluate(true), *valid_);
  report_.end({trainer_->steps_done(),
               0,
               "finished",
               fmt::format("finished   step {} of {} | {} tokens | {} skipped step(s)",
                           trainer_->steps_done(),
                           config().train.steps,
                           trainer_->tokens_seen(),
                           trainer_->skipped_steps())});
  if (!is_root()) return;
  try {
    mark_finished(config().run.dir, trainer_->steps_done());
    stops_->remove_file();            // a request in the last step
  } catch (const ResourceError& e) {  // everything is saved; starting again would evaluate again
    report_.line(fmt::format("warning    {}", e.what()));
  }
}

void TrainRun::count_saving(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  saving_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void TrainRun::finish_saving() {
  const PeriodScope period("saving", true);
  checkpointing_->finish();
}

void TrainRun::look_at_saves() {
  checkpointing_->look();
  if (const double seconds = checkpointing_->last_save_seconds(); seconds > 0)
    stops_->save_took(seconds);
}

// Whatever the interval: a run that is stopped more often than it saves must get on all the same.
int TrainRun::stop_early(StopReason reason) {
  finish_saving();
  stops_->remove_file();
  constexpr int kCode = static_cast<int>(ExitCode::requeue);
  report_.end(
      {trainer_->steps_done(),
       kCode,
       to_string(reason),
       fmt::format("stopped    {} at step {} of {}; the same command continues (exit code {})",
                   to_string(reason),
                   trainer_->steps_done(),
                   config().train.steps,
                   kCode)});
  return kCode;
}

void TrainRun::refuse_bad_numbers() const {
  const std::int64_t limit = config().train.max_bad_steps, step = trainer_->steps_done();
  if (trainer_->consecutive_bad_steps() < limit) return;
  throw NumericsError(
      fmt::format("{} steps in a row had a loss or gradient norm that was not finite, the last "
                  "one step {}; none of them was saved. "
                  "Lower optimizer.lr, or look at the data of {}.",
                  limit,
                  step,
                  limit == 1 ? fmt::format("that step")
                             : fmt::format("steps {} to {}", step - limit + 1, step)));
}

int run_training(const std::function<config::LoadedConfig()>& load,
                 const std::string& resume,
                 bool fallback,
                 const ConsoleArguments& console) {
  catch_stop_signals();  // first of all: a signal during the start is not lost
  config::LoadedConfig loaded;
  ResumeChoice choice;
  const int problem = run_before_mpi([&] {
    loaded = load();
    choice = resume_choice(resume, fallback);
  });
  if (problem != 0) return problem;
  CommOptions options;
  if (loaded.config.comm.reduction == config::ReductionOrder::library)
    options.reduction = Reduction::library;
  // MPI sets the variables of a launcher even for a process that has none.
  const ConsoleStyle style = console_style(console, this_terminal());
  Activity activity;
  options.activity = &activity;
  const ActivityOfThread here(&activity);
  const auto watchdog = make_watchdog(
      loaded.config.comm,
      activity,
      fmt::format("this ends the run with exit code {} (comm.watchdog_s); the same command "
                  "continues from the newest checkpoint",
                  static_cast<int>(ExitCode::watchdog)));
  return run_ranks(options, [&](const RankPlace& place) {
    require_same_start(place.world, loaded, resume + (fallback ? " --fallback" : ""));
    TrainRun run(loaded, choice, place, watchdog.get(), style);
    const int code = run.execute();
    activity.period.update([](Period& at) { at.name = "ending"; });
    return code;
  });
}

}  // namespace moesaic::apps
