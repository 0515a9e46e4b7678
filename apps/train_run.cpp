#include "apps/train_run.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>

#include <fmt/format.h>

#include "apps/config_changes.h"
#include "apps/version.h"
#include "comm/device_communicator.h"
#include "core/base/crc32c.h"
#include "core/checkpoint/checkpoint.h"
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

TrainRun::TrainRun(const config::LoadedConfig& loaded, Resume resume, const RankPlace& place)
    : loaded_(loaded), resume_(resume), place_(place), host_(place.world) {}
TrainRun::~TrainRun() = default;

std::filesystem::path TrainRun::checkpoints() const {
  return std::filesystem::path(config().run.dir) / "checkpoints";
}

void TrainRun::say(const std::string& line) const {
  if (is_root()) std::cout << line << std::endl;
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
  say(fmt::format("continuing from {} (step {})", found, trainer_->steps_done()));
}

// Another model cannot continue these weights; every other change is shown, old and new.
void TrainRun::report_changes(const std::string& checkpoint) const {
  std::string refused;
  for (const ConfigChange& c :
       config_changes(checkpoint_config(checkpoint), config::effective_yaml(loaded_))) {
    const std::string line = fmt::format("{}: {} -> {}", c.key, c.before, c.after);
    if (c.key.rfind("model.", 0) == 0) {
      refused += "\n  " + line;
    } else {
      say("changed    " + line);
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
  say(fmt::format("data       {}: {} documents, {} tokens | sequences of {} tokens, {} per step",
                  train_->name(),
                  train_->num_documents(),
                  train_->num_tokens(),
                  c.data.sequence_length,
                  c.train.global_batch_size));
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
                  checkpoints().string(),
                  c.checkpoint.every,
                  c.checkpoint.keep_last));
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

void TrainRun::save() {
  if (last_saved_ == trainer_->steps_done()) return;
  last_saved_ = trainer_->steps_done();
  if (is_root()) {
    const auto tensors = trainer_->state();
    save_checkpoint(checkpoints(),
                    last_saved_,
                    tensors,
                    trainer_->values(),
                    config::effective_yaml(loaded_),
                    config().checkpoint.keep_last,
                    config().checkpoint.keep_every,
                    trainer_->stream());
    if (metrics_) metrics_->event("save", last_saved_);
    say(fmt::format("step {} | save {}", last_saved_, checkpoints().string()));
  }
  host_.barrier();
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

int TrainRun::execute() {
  prepare();
  mark_ranges();
  lock_run_dir();
  continue_from_checkpoint();
  open_run_dir();
  print_header();
  open_metrics();
  const auto& train = config().train;
  const auto& checkpoint = config().checkpoint;
  while (trainer_->steps_done() < train.steps) {
    report(next_step());
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
      report_eval(false);
    // A state that only skips must not push good checkpoints out.
    if (checkpoint.every > 0 && step % checkpoint.every == 0 &&
        trainer_->consecutive_bad_steps() == 0)
      save();
    if (step < train.steps && out_of_time()) {
      save();
      say(
          fmt::format("stopped    run.max_minutes is over at step {} of {}; the same command "
                      "continues (exit code 75)",
                      step,
                      train.steps));
      return static_cast<int>(ExitCode::requeue);
    }
  }
  if (const std::int64_t bad = trainer_->consecutive_bad_steps(); bad > 0) {
    throw NumericsError(fmt::format(
        "the last {} step(s) were not finite; nothing was saved after step {}. Lower optimizer.lr.",
        bad,
        train.steps - bad));
  }
  if (checkpoint.save_at_end) save();
  if (valid_) report_final();
  say(fmt::format("finished   step {} of {} | {} tokens | {} skipped step(s)",
                  trainer_->steps_done(),
                  train.steps,
                  trainer_->tokens_seen(),
                  trainer_->skipped_steps()));
  return 0;
}

}  // namespace moesaic::apps
