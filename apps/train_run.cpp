#include "apps/train_run.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>

#include <fmt/format.h>

#include "apps/run_tokenizer.h"
#include "apps/version.h"
#include "comm/device_communicator.h"
#include "core/base/crc32c.h"
#include "core/data/entropy.h"
#include "core/model/from_config.h"
#include "core/model/plan.h"
#include "core/train/step_trace.h"
#include "kernels/cuda_handles.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kGiB = 1024.0 * kMiB;

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw ResourceError(fmt::format("{}: could not be written", path.string()));
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

TrainRun::TrainRun(const config::LoadedConfig& loaded, ResumeChoice resume, const RankPlace& place)
    : loaded_(loaded), resume_(std::move(resume)), place_(place), host_(place.world) {}
TrainRun::~TrainRun() = default;

void TrainRun::say(const std::string& line) const {
  if (is_root()) std::cout << line << std::endl;
}

void TrainRun::prepare() {
  check_trainable(config());
  const Device device = resolve_device(config(), place_.local_rank, place_.local_size);
  const auto configured = tokenizer_of_config(config());
  train_ = open_training_data(config(), configured);
  if (!config().data.valid.empty()) valid_ = open_tokens(config().data.valid, config(), configured);
  std::vector<const data::TokenSource*> sources = train_.sources();
  if (valid_) sources.push_back(valid_.get());
  const auto tokenizer = tokenizer_of_data(configured, sources);
  tokenizer_hash_ = tokenizer ? tokenizer->content_hash() : kUnknownTokenizer;
  if (device.kind == Device::Kind::cuda) {
    std::vector<data::DocumentBound> documents{train_.document_bound()};
    if (valid_) documents.emplace_back(*valid_);
    const auto before = cuda::device_memory(device);
    memory_before_ = before.total - before.free;
    memory_plan_ =
        plan_memory(config(), device, precision_of(config(), true), documents, host_.size());
    check_memory();
    if (host_.size() > 1)
      device_world_ = make_device_communicator(host_, device, device_comm_options(config()));
  }
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
    keep_tokenizer(config());
  }
  host_.barrier();
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

void TrainRun::print_header() const {
  if (!is_root()) return;
  const ModelPlan plan = make_plan(config());
  const auto& c = config();
  say(first_line(version_text()));
  say(fmt::format("run        {} | seed {} | {} rank(s) x {} thread(s) | device {} | precision {}",
                  c.run.dir,
                  c.run.seed,
                  host_.size(),
                  c.run.threads,
                  to_string(assembly_.device),
                  name(assembly_.precision.compute)));
  say(
      fmt::format("model      {} layers | {} parameters, {} active per token | training {:.2f} "
                  "MFLOP per token (3 x forward; formulas: moesaic plan)",
                  plan.layers.size(),
                  plan.model.all,
                  plan.model.active,
                  static_cast<double>(plan.training_flops) / 1e6));
  print_data();
  std::string memory = "memory     per rank:";
  for (const auto& use : memory_in_use()) {
    if (static_cast<double>(use.bytes) >= 0.05 * kMiB)
      memory += fmt::format(" {} {:.1f} MiB |", use.tag, static_cast<double>(use.bytes) / kMiB);
  }
  say(memory.substr(0, memory.find_last_not_of(" |") + 1));
  if (assembly_.device.kind == Device::Kind::cuda) {
    say(fmt::format("device     {} | {} | exchange between ranks {}",
                    cuda::device_name(assembly_.device),
                    memory_line(),
                    device_world_ ? "NCCL " + device_communicator_version() : "none"));
  }
  say(fmt::format("checkpoint {} | every {} steps | keep last {}",
                  checkpoints_of(c).string(),
                  c.checkpoint.every,
                  c.checkpoint.keep_last));
  say("stop       " + how_to_stop(c.run.dir));
}

void TrainRun::open_metrics() {
  for (const PhasePlan& phase : make_plan(config()).phases)
    phase_flops_.push_back({phase.end, 3.0 * static_cast<double>(phase.forward_flops)});
  if (!is_root() || !config().log.metrics) return;
  const std::string yaml = config::effective_yaml(loaded_);
  RunHeader header;
  header.config_hash = fmt::format("{:08x}", crc32c(yaml.data(), yaml.size()));
  header.version = first_line(version_text());
  header.ranks = host_.size();
  header.start_step = trainer_->steps_done();
  header.texts["device"] = to_string(assembly_.device);
  header.texts["precision"] = name(assembly_.precision.compute);
  header.texts["flops"] = "training FLOPs per token of `moesaic plan`: 3 x forward";
  metrics_ = std::make_unique<MetricsWriter>(
      std::filesystem::path(config().run.dir) / "metrics.jsonl", header);
}

void TrainRun::report(const StepStats& stats) {
  if (!reported_) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
    say(fmt::format("started    first step done {:.1f} s after the start{}",
                    since.count(),
                    memory_plan_ ? " | " + memory_line() : ""));
    reported_ = true;
  }
  StepRecord record;
  record.step = stats.step;
  record.steps = config().train.steps;
  record.loss = stats.loss;
  const auto& model = config().model;
  if (model.mtp.num_nextn_predict_layers > 0) record.loss_parts["mtp"] = stats.mtp_loss;
  if (model.indexer) record.loss_parts["indexer_kl"] = stats.indexer_kl;
  if (model.balance.aux_loss != config::AuxLoss::none)
    record.loss_parts["balance"] = stats.balance_loss;
  if (model.balance.z_loss_weight != 0) record.loss_parts["router_z"] = stats.router_z;
  record.grad_norm = stats.grad_norm;
  record.learning_rate = stats.learning_rate;
  record.tokens = stats.tokens;
  record.seconds = stats.seconds;
  record.skipped = stats.skipped;
  record.experts = stats.experts;
  for (const auto& [last_step, flops] : phase_flops_) {
    if (stats.step > last_step) continue;
    record.flops = flops * static_cast<double>(stats.tokens);
    break;
  }
  record.total_tokens = trainer_->tokens_seen();
  log_.add(record);
  if (metrics_) metrics_->write(record);
  if (stats.step % config().log.interval == 0 || stats.step == config().train.steps)
    say(log_.line());
  if (stats.skipped) {
    say(fmt::format(
        "step {} | skip: loss or gradient norm is not finite; nothing was updated ({} in a row)",
        stats.step,
        trainer_->consecutive_bad_steps()));
  }
}

double TrainRun::report_eval(bool whole) {
  const EvalStats stats = trainer_->evaluate(whole);
  say(fmt::format("step {} | eval loss {:.4f} nats/token over {} held-out tokens",
                  trainer_->steps_done(),
                  stats.loss,
                  stats.predicted_tokens));
  if (metrics_)
    metrics_->event(
        "eval",
        trainer_->steps_done(),
        {{"loss", stats.loss}, {"tokens", static_cast<double>(stats.predicted_tokens)}});
  return stats.loss;
}

// What a reader of text needs to judge the loss by: a model that knows only the frequencies of bytes, or of pairs.
void TrainRun::report_final() {
  const double loss = report_eval(true);
  if (!is_root() || valid_->info().format != config::DataFormat::bytes_text) return;
  data::TokenCounts counts;
  counts.add(*valid_);
  const double unigram = data::unigram_entropy(counts), bigram = data::bigram_entropy(counts);
  say(
      fmt::format("held-out   loss {:.4f} nats/byte | unigram entropy {:.4f} (loss is {:.2f} x) | "
                  "bigram entropy {:.4f} (loss is {:.2f} x)",
                  loss,
                  unigram,
                  loss / unigram,
                  bigram,
                  loss / bigram));
}

// All ranks agree whether there is another step, and if not, why.
std::optional<StepStats> TrainRun::next_step(StopReason& stop) {
  auto wish = static_cast<std::int64_t>(stops_->wish());
  const auto stats = traced_step(wish);
  stop = static_cast<StopReason>(wish);
  if (stats) stops_->step_took(stats->seconds);
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
  say(fmt::format("step {} | trace {}", step, path));
  return stats;
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
                           .say = [this](const std::string& line) { say(line); },
                           .event =
                               [this](const std::string& type,
                                      std::int64_t step,
                                      const std::map<std::string, double>& values) {
                                 if (metrics_) metrics_->event(type, step, values);
                               }});
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
  const ResumeParts parts{.loaded = &loaded_,
                          .choice = resume_,
                          .tokenizer = tokenizer_hash_,
                          .host = &host_,
                          .trainer = trainer_.get(),
                          .say = [this](const std::string& line) { say(line); }};
  const Continued continued = continue_run(parts);
  checkpointing_->set_origin(continued.origin);
  checkpointing_->set_tokenizer(tokenizer_hash_);
  if (continued.is_own) checkpointing_->is_saved();
  if (!continued.yes && config().checkpoint.load_weights) load_start_weights(parts);
  return continued.changes;
}

int TrainRun::execute() {
  prepare();
  mark_ranges();
  if (is_root()) lock_ = lock_run_dir(config().run.dir);
  prepare_saving();
  const std::vector<ConfigChange> changes = load_state();
  open_run_dir();
  print_header();
  open_metrics();
  for (const ConfigChange& c : changes) {
    if (metrics_)
      metrics_->event("changed",
                      trainer_->steps_done(),
                      {},
                      {{"key", c.key}, {"before", c.before}, {"after", c.after}});
  }
  try {
    return train();
  } catch (...) {
    checkpointing_->drain();
    throw;
  }
}

int TrainRun::train() {
  const auto& train = config().train;
  while (trainer_->steps_done() < train.steps) {
    look_at_saves();
    StopReason stop = StopReason::none;
    const auto stats = next_step(stop);
    if (!stats) return stop_early(stop);
    report(*stats);
    refuse_bad_numbers();
    const std::int64_t step = trainer_->steps_done();
    if (valid_ && train.eval_every > 0 && step % train.eval_every == 0 && step < train.steps)
      report_eval(false);
    const std::int64_t every = config().checkpoint.every;
    // A state that only skips must not push good checkpoints out.
    if (every > 0 && step % every == 0 && trainer_->consecutive_bad_steps() == 0)
      checkpointing_->save();
  }
  if (const std::int64_t bad = trainer_->consecutive_bad_steps(); bad > 0) {
    throw NumericsError(fmt::format(
        "the last {} step(s) were not finite; nothing was saved after step {}. Lower optimizer.lr.",
        bad,
        train.steps - bad));
  }
  if (config().checkpoint.save_at_end) checkpointing_->finish();
  report_data_use();
  if (valid_) report_final();
  say(fmt::format("finished   step {} of {} | {} tokens | {} skipped step(s)",
                  trainer_->steps_done(),
                  train.steps,
                  trainer_->tokens_seen(),
                  trainer_->skipped_steps()));
  return 0;
}

void TrainRun::look_at_saves() {
  checkpointing_->look();
  if (const double seconds = checkpointing_->last_save_seconds(); seconds > 0)
    stops_->save_took(seconds);
}

// Whatever the interval: a run that is stopped more often than it saves must get on all the same.
int TrainRun::stop_early(StopReason reason) {
  checkpointing_->finish();
  stops_->remove_file();
  say(fmt::format("stopped    {} at step {} of {}; the same command continues (exit code 75)",
                  to_string(reason),
                  trainer_->steps_done(),
                  config().train.steps));
  if (metrics_)
    metrics_->event("stop", trainer_->steps_done(), {}, {{"reason", to_string(reason)}});
  return static_cast<int>(ExitCode::requeue);
}

void TrainRun::refuse_bad_numbers() const {
  const std::int64_t limit = config().train.max_bad_steps, step = trainer_->steps_done();
  if (trainer_->consecutive_bad_steps() < limit) return;
  throw NumericsError(
      fmt::format("{} steps in a row had a loss or gradient norm that was not finite, the last "
                  "one step {}; none of them was saved. "
                  "Lower optimizer.lr, or look at the data of steps {} to {}.",
                  limit,
                  step,
                  step - limit + 1,
                  step));
}

int run_training(const std::function<config::LoadedConfig()>& load,
                 const std::string& resume,
                 bool fallback) {
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
  return run_ranks(options, [&](const RankPlace& place) {
    TrainRun run(loaded, choice, place);
    return run.execute();
  });
}

}  // namespace moesaic::apps
