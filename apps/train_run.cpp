#include "apps/train_run.h"

#include <chrono>

#include <fmt/format.h>
#include <unistd.h>

#include "apps/doctor/start_warnings.h"
#include "apps/finished_mark.h"
#include "apps/rank_agreement.h"
#include "apps/run_tokenizer.h"
#include "comm/device_communicator.h"
#include "core/base/durable_file.h"
#include "core/model/from_config.h"

namespace moesaic::apps {

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
  note_idle_keys();
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
