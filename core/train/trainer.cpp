#include "core/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "core/base/activity.h"
#include "core/nn/expert_tiers.h"
#include "core/train/balance_update.h"
#include "core/train/host_value.h"
#include "core/train/store_ids.h"
#include "core/train/tier_schedule.h"
#include "kernels/ops/elementwise.h"
#include "kernels/part_scope.h"

namespace moesaic {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Trainer::Trainer(Parts parts)
    : parts_(std::move(parts)),
      phases_(make_phases(*parts_.config)),
      token_groups_(parts_.params->position(), parts_.mesh),
      exchange_meter_(parts_.device) {
  check_layout();
  check_data();
  allocate();
}
// Updates of offloaded experts for which nobody asked are lost with it.
Trainer::~Trainer() {
  // After an exception work may still be queued that points into the memory below.
  try {
    backend_->stream().synchronize();
    if (exchange_side_) exchange_side_->stream().synchronize();
    if (offloader_) offloader_->synchronize();
  } catch (...) {  // whoever cares has seen it already
  }
}

Communicator* Trainer::stage() const {
  if (parts_.mesh == nullptr) return nullptr;
  return parts_.mesh->group({Axis::dp, Axis::cp, Axis::tp}).comm();
}

Communicator* Trainer::stages() const {
  return parts_.mesh == nullptr ? nullptr : parts_.mesh->group(Axis::pp).comm();
}

void Trainer::check_layout() const {
  for (const Phase& phase : phases_) {
    const std::int64_t batch = phase.global_batch_size, micro = phase.micro_batch_size;
    const std::int64_t unit = micro * ranks();
    if (batch % unit == 0) continue;
    throw UsageError(fmt::format(
        "train.global_batch_size{}: {} is not a multiple of train.micro_batch_size ({}) x {} "
        "data-parallel rank(s). Nearest valid: {}{}",
        phases_.size() > 1 ? fmt::format(" of phase {}", phase.index) : "",
        batch,
        micro,
        ranks(),
        batch > unit ? fmt::format("{}, ", batch / unit * unit) : "",
        (batch / unit + 1) * unit));
  }
}

// The arenas are sized once, for the phase that needs most; only the first step of a phase allocates (its batches).
// Text that is too short for a later phase must not stop the run when that phase begins.
void Trainer::check_data() const {
  for (const Phase& phase : phases_) {
    for (const auto& set : parts_.train.sets)
      data::num_windows(set.source, phase.sequence_length);
    if (parts_.valid) data::num_windows(parts_.valid, phase.sequence_length);
  }
}

void Trainer::allocate() {
  const auto& config = *parts_.config;
  std::vector<data::DocumentBound> documents{parts_.train.document_bound()};
  if (parts_.valid) documents.emplace_back(*parts_.valid);
  memory_ = measure_run(config,
                        phases_,
                        documents,
                        *parts_.model,
                        *parts_.params,
                        parts_.optimizer,
                        parts_.device,
                        parts_.recompute,
                        parts_.path,
                        parts_.ranks_per_node);
  allocate_batches();
  backend_ = std::make_unique<BackendOwner>(
      BackendOwner::Options{.device = parts_.device,
                            .mode = parts_.stream_mode,
                            .num_threads = static_cast<int>(config.run.threads),
                            .scratch_bytes = memory_.scratch,
                            .name = "main",
                            .path = parts_.path});
  if (memory_.exchange > 0) {
    exchange_side_ = std::make_unique<BackendOwner>(
        BackendOwner::Options{.device = parts_.device,
                              .mode = parts_.stream_mode,
                              .num_threads = static_cast<int>(config.run.threads),
                              .scratch_bytes = memory_.exchange,
                              .name = "exchange",
                              .path = parts_.path});
  }
  timer_ = std::make_unique<StepTimer>(backend_->stream());
  transient_ = std::make_unique<Arena>(memory_.transient, parts_.device, "transient");
  for (int i = 0; i < memory_.num_deferred; ++i)
    deferred_.push_back(std::make_unique<Arena>(memory_.deferred, parts_.device, "split backward"));
  slot_memory_ = Buffer(memory_.slot, parts_.device, "saved activations");
  if (memory_.piece_sums > 0)
    piece_sum_memory_ = Buffer(memory_.piece_sums, parts_.device, "key gradients of pieces");
  if (memory_.offload > 0)
    offload_memory_ = Buffer(memory_.offload, parts_.device, "offloaded activations");
  allocate_offload_host();
  const DType stats = parts_.params->precision().stats;
  const std::int64_t rows = parts_.model->loss_rows();
  losses_memory_ = Buffer(losses_bytes(*parts_.model), parts_.device, "losses");
  losses_ = losses_memory_.view({kNumLosses}, stats);
  loss_rows_ = losses_memory_.view({rows, kNumLosses}, stats, kNumLosses * 8);
  if (world() != nullptr)
    reduction_ =
        std::make_unique<GradientReduction>(*parts_.params, *parts_.mesh, parts_.stream_mode);
  const ExpertTiers* tiers = parts_.params->tiers();
  if (world() != nullptr && tiers != nullptr && tiers->holds_weights())
    member_reduction_ = std::make_unique<MemberReduction>(*parts_.params, parts_.mesh);
  if (member_reduction_ && !member_reduction_->is_needed()) member_reduction_.reset();
  ExpertUpdates::check_in_backward(config, *parts_.params, *parts_.optimizer);
  if (ExpertUpdates::can_run_beside(*parts_.params, *parts_.optimizer)) {
    expert_updates_ = std::make_unique<ExpertUpdates>(
        *parts_.params,
        *parts_.optimizer,
        BackendOwner::Options{
            .device = parts_.device,
            .mode = parts_.stream_mode,
            .num_threads = static_cast<int>(config.run.threads),
            .scratch_bytes = memory_.updates,
            .name = "updates",
            .path = parts_.path,
            // Small kernels, each awaited by copies: not behind products of a millisecond.
            .priority = Stream::Priority::high});
  }
  // Split masters round to bf16 in their own way, which only their owner can.
  gather_weights(true);
  if (config.experts.place_every > 0) {
    placer_ = std::make_unique<ExpertPlacer>(
        *parts_.params,
        *parts_.optimizer,
        parts_.model->moe_layers(),
        stage(),
        ExpertPlacer::Options{
            .every = config.experts.place_every,
            .decay = config.experts.place_decay,
            .nodes = expert_nodes(parts_.params->position(), parts_.ranks_per_node)});
  }
  if (config.experts.replicas > 0 && parts_.params->position().extent(Axis::ep) > 1) {
    if (tiers != nullptr)
      throw UsageError(
          "experts.replicas keeps copies of experts on the device, which offloaded ones cannot "
          "have yet; set experts.replicas=0 or experts.offload=none");
    copier_ = std::make_unique<ExpertCopier>(*parts_.params, *parts_.mesh->group(Axis::ep).comm());
  }
  allocate_results();
}

// For the phase that needs most, so that nothing is allocated once training has begun.
void Trainer::allocate_batches() {
  const StepBuffers sizes = step_buffers(phases_, *parts_.model, *parts_.params, ranks());
  host_batches_ = make_host_buffer(sizes.batches, parts_.device, "batches, host");
  batch_memory_ = Buffer(sizes.batches, parts_.device, "batches");
  if (sizes.margins > 0) margin_memory_ = Buffer(sizes.margins, parts_.device, "balance margins");
}

// Phases with longer sequences have fewer or smaller micro-batches, in the same memory.
void Trainer::place_batches(const Phase& phase) {
  const bool mtp = parts_.config->model.mtp.num_nextn_predict_layers > 0;
  const std::int64_t tokens = phase.micro_batch_tokens();
  const auto in_turn = static_cast<int>(phase.pieces);
  const std::size_t bytes = SequenceBuffers::bytes_for(tokens, piece().count * in_turn);
  const Shape shape{static_cast<std::int64_t>(bytes / 4)};
  micro_batches_.clear();
  for (std::int64_t i = 0; i < phase.passes(ranks()); ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * bytes;
    const SequenceBuffers::Piece in_turn_piece{
        .index = static_cast<int>(i % in_turn), .count = in_turn, .in_turn = true};
    micro_batches_.push_back(
        std::make_unique<SequenceBuffers>(tokens,
                                          host_batches_.view(shape, DType::i32, at),
                                          batch_memory_.view(shape, DType::i32, at),
                                          mtp,
                                          in_turn > 1 ? in_turn_piece : piece()));
  }
}

void Trainer::enter_phase(const Phase& phase) {
  if (phase_ == phase.index) return;
  if (expert_updates_) expert_updates_->finish();  // they are of the phase before
  backend_->stream().synchronize();
  phase_ = phase.index;
  prepared_step_ = -1;
  const auto& config = *parts_.config;
  const std::int64_t tokens = phase.piece_tokens();
  pieces_ = phase.pieces;
  place_batches(phase);
  const MeshPosition& position = parts_.params->position();
  activations_.reset();
  pipeline_.reset();
  if (position.extent(Axis::ep) > 1) {
    exchange_ = make_expert_exchange(config,
                                     phase,
                                     parts_.params->precision(),
                                     position,
                                     parts_.ranks_per_node,
                                     parts_.mesh->group(Axis::ep).comm(),
                                     parts_.params->wants_member_rows());
    exchange_->set_meter(&exchange_meter_);
    if (exchange_side_) exchange_->set_side(&exchange_side_->backend());
  }
  Bounds bounds = token_groups_.bounds(tokens, phase.sequence_length, exchange_.get());
  bounds.pieces = phase.pieces;
  parts_.model->plan(bounds, parts_.recompute);
  parts_.model->set_sparse_stage(phase.sparse);
  if (walks_chunks()) {
    place_pipeline(phase);
  } else {
    place_offload(StepPasses::of_one_chunk());
    activations_ = std::make_unique<Model::MicroBatch>(parts_.model->make_micro_batch(
        slot_memory_.view({static_cast<std::int64_t>(parts_.model->slot_bytes())}, DType::u8),
        0,
        offload_ ? offload_->parts(*offloader_, 0, 0) : std::vector<TensorView>()));
  }
  dataset_ = std::make_unique<data::BlendedDataset>(parts_.train,
                                                    static_cast<std::uint64_t>(config.run.seed),
                                                    phase.index,
                                                    phase.sequence_length);
  if (parts_.valid) {
    const std::int64_t wanted = config.train.eval_batches * phase.global_batch_size;
    validation_ =
        std::make_unique<data::ValidationSet>(parts_.valid, phase.sequence_length, wanted);
  }
  for (std::size_t i = 0; i < parts_.params->params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    const ParameterSpec& spec = parts_.params->params()[i];
    if (parts_.params->ever_trained(id)) parts_.params->set_frozen(id, !trains(phase, spec));
    double scale = 1;
    for (const auto& [pattern, factor] : phase.lr_scale) {
      if (glob_match(pattern, spec.name)) scale = factor;
    }
    parts_.optimizer->set_lr_scale(id, scale);
  }
  if (ExpertTiers* tiers = parts_.params->tiers()) {
    const std::vector<tiers::Visit> visits = expert_visits(config, phase, *parts_.model, position);
    if (expert_updates_) expert_updates_->set_parts(update_parts(visits));
    tiers->set_schedule(!expert_updates_                 ? visits
                        : expert_updates_->in_backward() ? with_updates_in_backward(visits)
                                                         : with_updates_beside(visits),
                        expert_updates_ && parts_.optimizer->late_steps() > 1
                            ? tiers::Updates::touched
                            : tiers::Updates::dense);
  }
  choose_balanced(phase);
  place_margins(tokens / position.extent(Axis::cp) / position.extent(Axis::tp) *
                static_cast<std::int64_t>(micro_batches_.size()));
}

// The exact rule keeps the margins of the whole step: [all ranks' tokens, experts] per layer, this rank's slice first.
void Trainer::place_margins(std::int64_t rank_tokens) {
  std::vector<MoeLayer*> exact;
  for (const auto& named : parts_.model->moe_layers()) {
    if (named.moe->options().bias_rule == BiasRule::quantile_exact) exact.push_back(named.moe);
  }
  if (exact.empty()) return;
  const MeshPosition& position = parts_.params->position();
  const int ranks_of_stage = position.world_size() / position.extent(Axis::pp);
  const std::int64_t experts = exact[0]->options().experts,
                     here = position.world_rank() % ranks_of_stage,
                     all = rank_tokens * ranks_of_stage;
  const DType stats = parts_.params->precision().stats;
  const TensorView margins =
      margin_memory_.view({static_cast<std::int64_t>(exact.size()), all, experts}, stats);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const TensorView layer = margins.rows(row, row + 1).reshaped({all, experts});
    exact[i]->set_margins(layer.rows(here * rank_tokens, (here + 1) * rank_tokens), layer);
  }
}

// The bias of a router stands still in phases that freeze it: by name, or in the indexer's warm-up like everything else.
void Trainer::choose_balanced(const Phase& phase) {
  balanced_.clear();
  if (!phase.sparse) return;
  for (const auto& named : parts_.model->moe_layers()) {
    const std::string& bias =
        parts_.params->buffers()[static_cast<std::size_t>(named.moe->bias().index)].name;
    const bool frozen = std::any_of(phase.freeze.begin(),
                                    phase.freeze.end(),
                                    [&](const std::string& p) { return glob_match(p, bias); });
    if (!frozen) balanced_.push_back(named);
  }
}

// The gradient of a parameter that the phase trains, and that lies on the device.
TensorView Trainer::some_gradient() const {
  for (std::size_t i = 0; i < parts_.params->params().size(); ++i) {
    const ParamId id = param_id(i);
    if (parts_.params->has_tiered_weights(parts_.params->storage_of(id))) continue;
    if (const TensorView g = parts_.params->gradient(id, 0); !g.empty()) return g;
  }
  return {};
}

// What step `step` (from 0) reads, a pure function of its number; made while the device is busy with the step before.
void Trainer::prepare_batches(const Phase& phase, std::int64_t step) {
  const std::int64_t first = (step - phase.begin) * phase.global_batch_size;
  const data::SampleRange share =
      data::share_of_rank(first, phase.global_batch_size, rank(), ranks());
  prepared_.clear();
  for (std::int64_t i = 0; i < phase.micro_batches(ranks()); ++i) {
    const std::int64_t offset = i * phase.micro_batch_size;
    prepared_.push_back(dataset_->batch({share.first + offset, phase.micro_batch_size}));
  }
  prepared_step_ = step;
}

void Trainer::load_batches(const Phase& phase) {
  if (prepared_step_ != step_) prepare_batches(phase, step_);  // step_ counts finished steps
  for (std::size_t i = 0; i < micro_batches_.size(); ++i)
    micro_batches_[i]->load(prepared_[i / static_cast<std::size_t>(phase.pieces)],
                            backend_->stream());
}

// Counts that depend on data only are summed over the global batch before the first forward; losses divide by them.
BatchCounts Trainer::count_batches(std::int64_t stop_wish) const {
  BatchCounts own;
  own.stop_wish = stop_wish;
  // All stages load the same batches: the first one counts them.
  if (parts_.params->position().coordinate(Axis::pp) > 0) return over_ranks(own, world());
  for (const auto& m : micro_batches_) {
    if (!counts_batch()) break;
    own.valid_targets += m->valid_targets();
    own.mtp_targets += m->mtp_targets();
    own.documents += m->documents();
    own.tokens += m->sequence().num_tokens();
  }
  return over_ranks(own, world());
}

StepScalars Trainer::step_scalars(const Phase& phase, const BatchCounts& counts) const {
  const auto at_least_one = [](std::int64_t n) {
    return static_cast<double>(std::max<std::int64_t>(1, n));
  };
  StepScalars s;
  s.learning_rate = phase.learning_rate(step_ + 1);
  s.loss_divisor = at_least_one(counts.valid_targets);
  s.mtp_divisor = at_least_one(counts.mtp_targets);
  s.documents = at_least_one(counts.documents);
  s.tokens = static_cast<double>(counts.tokens);
  s.step = static_cast<double>(step_ + 1);
  return s;
}

void Trainer::reset_step_buffers() {
  Stream& stream = backend_->stream();
  parts_.params->zero_grads(stream);
  if (ExpertTiers* tiers = parts_.params->tiers()) tiers->begin_step();
  zero_tensor(losses_, stream);
  zero_tensor(loss_rows_, stream);
  const auto specs = parts_.params->buffers();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].lifetime != Lifetime::step) continue;
    const TensorView view = parts_.params->buffer({static_cast<std::int32_t>(i)});
    if (specs[i].reduce == BufferReduce::max) {
      run(backend_->backend(), Fill{.y = view, .value = -std::numeric_limits<double>::infinity()});
    } else {
      zero_tensor(view, stream);
    }
  }
  for (const auto& named : parts_.model->moe_layers())
    named.moe->reset_margins();
  if (reduction_) reduction_->begin();
  if (copier_) copier_->begin_step();
}

std::int64_t Trainer::expert_replicas() const {
  std::int64_t n = 0;
  for (const auto& named : parts_.model->moe_layers())
    n += parts_.params->copies(named.moe->places()).num_copies();
  return n;
}

// Layer by layer: the same bits in any order of layers and micro-batches.
void Trainer::add_losses_of_layers() {
  for (std::int64_t row = 0; row < loss_rows_.dim(0); ++row)
    run(backend_->backend(), Accumulate{.y = losses_, .x = loss_row(loss_rows_, row)});
}

void Trainer::reduce_over_ranks() {
  add_losses_of_layers();
  if (world() == nullptr) return;
  Stream& stream = backend_->stream();
  if (copier_) copier_->gradients_final_from({0}, backend_->backend());
  reduction_->finish(stream);
  if (member_reduction_) {
    member_reduction_->reduce(
        backend_->backend(), [this](StorageId id, std::int64_t member, const TensorView& sum) {
          parts_.optimizer->gradient_final(backend_->backend(), id, member, sum);
        });
  }
  if (pipeline_) pipeline_->add_gradients_of_copies();
  world()->all_reduce(losses_, ReduceOp::sum, stream);
  if (stage() == nullptr) return;
  const auto specs = parts_.params->buffers();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].lifetime != Lifetime::step || specs[i].reduce == BufferReduce::none) continue;
    const ReduceOp op = specs[i].reduce == BufferReduce::max ? ReduceOp::max : ReduceOp::sum;
    stage()->all_reduce(parts_.params->buffer({static_cast<std::int32_t>(i)}), op, stream);
  }
}

RunContext Trainer::training_context(std::size_t micro_batch,
                                     Arena& arena,
                                     WeightGradients& gradients) {
  return {.backend = backend_->backend(),
          .params = *parts_.params,
          .transient = arena,
          .weight_gradients = gradients,
          .sequence = micro_batches_[micro_batch]->sequence(),
          .step_scalars = parts_.optimizer->scalars(),
          .losses = loss_rows_,
          .training = true,
          .gradients_final = {},
          .choices = choices_,
          .micro_batch =
              static_cast<std::int64_t>(static_cast<std::size_t>(rank()) * micro_batches_.size() +
                                        micro_batch) /
              pieces_,
          .micro_batch_here = static_cast<std::int32_t>(micro_batch),
          .piece_sums = piece_sums(),
          .offload = offloader_.get()};
}

StepStats Trainer::step() {
  std::int64_t no_wish = 0;
  return step_unless_stopped(no_wish).value();
}

std::optional<StepStats> Trainer::step_unless_stopped(std::int64_t& stop_wish) {
  if (!begin_step(stop_wish)) return std::nullopt;
  forward_backward();
  return finish_step();
}

void Trainer::accumulate_gradients() {
  std::int64_t no_wish = 0;
  begin_step(no_wish);
  forward_backward();
}

// Loads and counts the batches; false, and nothing done, when a rank wants to stop.
bool Trainer::begin_step(std::int64_t& stop_wish) {
  begun_ = std::chrono::steady_clock::now();
  const Phase& phase = phase_of(phases_, step_ + 1);
  if (Activity* activity = activity_of_thread())
    activity->period.update([this](Period& at) { at.step = step_ + 1; });
  enter_phase(phase);
  timer_->begin();
  load_batches(phase);
  timer_->host_did(StepPart::data);
  const BatchCounts counts = count_batches(stop_wish);
  timer_->host_did(StepPart::communication);
  stop_wish = counts.stop_wish;
  if (stop_wish > 0) return false;
  scalars_ = step_scalars(phase, counts);
  begin_exchanges();
  timer_->stream_does(StepPart::other);
  parts_.optimizer->begin_step(scalars_, backend_->stream());
  reset_step_buffers();
  if (parts_.config->debug.inject_nan_step == step_ + 1) {  // gradients are added to it
    const TensorView gradient = some_gradient();
    if (!gradient.empty())  // this stage may have nothing to train in this phase
      run(backend_->backend(),
          Fill{.y = gradient, .value = std::numeric_limits<double>::quiet_NaN()});
  }
  return true;
}

void Trainer::begin_exchanges() {
  if (exchange_ == nullptr) return;
  passes_before_.clear();
  for (const auto& named : parts_.model->moe_layers())
    passes_before_.push_back(named.moe->further_passes());
  const std::int64_t every = parts_.config->log.detail_every;
  if (every > 0 && (step_ + 1) % every == 0) exchange_meter_.begin();
}

// In the last backward: those of `first` and all storages after it.
void Trainer::gradients_final(StorageId first) {
  if (copier_) copier_->gradients_final_from(first, backend_->backend());
  if (reduction_) reduction_->final_from(first, backend_->stream());
  if (!member_reduction_) parts_.optimizer->gradients_final(backend_->backend(), first);
  if (expert_updates_ && expert_updates_->in_backward())
    expert_updates_->gradients_final(backend_->backend(), first);
}

// Before the last backward. Where that updates experts it must know by then whether the step is skipped for its losses.
void Trainer::forwards_done() {
  if (!expert_updates_ || !expert_updates_->in_backward()) return;
  Stream& stream = backend_->stream();
  add_losses_of_layers();
  if (world() != nullptr) world()->all_reduce(losses_, ReduceOp::sum, stream);
  parts_.optimizer->guard_losses(backend_->backend(), losses_);
  zero_tensor(losses_, stream);  // backward adds to them
  expert_updates_->begin_backward(backend_->backend());
}

void Trainer::forward_backward() {
  if (pipeline_) {
    timer_->stream_does(StepPart::communication);
    pipeline_->run([this](StorageId first) { gradients_final(first); },
                   [this] { forwards_done(); });
    return reduce_over_ranks();
  }
  for (std::size_t i = 0; i < micro_batches_.size(); ++i) {
    RunContext c = training_context(i, *transient_, at_once_);
    timer_->stream_does(StepPart::forward);
    parts_.model->forward(c, *activations_);
    if (i + 1 == micro_batches_.size()) forwards_done();
    timer_->stream_does(StepPart::backward);
    if (i + 1 == micro_batches_.size())
      c.gradients_final = [this](StorageId first) { gradients_final(first); };
    parts_.model->backward(c, *activations_);
  }
  timer_->stream_does(StepPart::communication);
  reduce_over_ranks();
}

void Trainer::gather_weights(bool all) {
  if (reduction_) reduction_->gather_weights(backend_->stream());
  if (member_reduction_) member_reduction_->gather_weights(backend_->backend(), all);
}

StepStats Trainer::finish_step() {
  timer_->stream_does(StepPart::optimizer);
  {
    const PartScope part(backend_->backend(), "optimizer");
    parts_.optimizer->clip(backend_->backend(), losses_, world());
    parts_.optimizer->update(backend_->backend(), parts_.mesh);
    if (expert_updates_) {
      expert_updates_->begin(backend_->backend());
    } else {
      parts_.optimizer->update_experts(backend_->backend());
    }
    parts_.optimizer->qk_clip(backend_->backend(), parts_.model->mla_layers());
    gather_weights(false);
    if (copier_) copier_->send_weights(backend_->stream());
    parts_.optimizer->average(backend_->backend());
  }
  {
    const PartScope part(backend_->backend(), "balance");
    update_balance(
        backend_->backend(), *parts_.params, balanced_, parts_.optimizer->scalars(), stage());
  }
  timer_->stream_ends();
  const Phase& phase = phase_of(phases_, step_ + 1);
  if (step_ + 1 < phase.until) prepare_batches(phase, step_ + 1);
  timer_->prepared_next();
  StepStats stats;
  read_results(stats, scalars_);
  ++step_;
  tokens_seen_ += stats.tokens;
  stats.step = step_;
  place_experts(stats);
  stats.seconds = seconds_since(begun_);
  stats.parts = timer_->read(stats.seconds);
  stats.activations_out = static_cast<std::int64_t>(offload_traffic().out);
  stats.activations_in = static_cast<std::int64_t>(offload_traffic().in);
  stats.replays = replays_of_step();
  return stats;
}

std::optional<ExpertReplays> Trainer::replays_of_step() {
  const auto all = expert_updates_ ? expert_updates_->replays() : std::nullopt;
  if (!all) return std::nullopt;
  const ExpertReplays before = std::exchange(replays_before_, *all);
  return ExpertReplays{all->members - before.members, all->steps - before.steps};
}

// The sum over the labels of one batch.
double Trainer::loss_of(const data::Batch& batch) {
  Stream& stream = backend_->stream();
  zero_tensor(losses_, stream);
  const auto context = [&](std::int64_t piece) {
    RunContext c = training_context(static_cast<std::size_t>(piece), *transient_, at_once_);
    c.training = false;
    c.choices = nullptr;
    c.offload = nullptr;
    c.losses = losses_;
    return c;
  };
  for (std::int64_t piece = 0; piece < pieces_; ++piece)
    micro_batches_[static_cast<std::size_t>(piece)]->load(batch, stream);
  if (pipeline_) {
    for (std::int64_t piece = 0; piece < pieces_; ++piece) {
      RunContext c = context(piece);
      pipeline_->evaluate(c, static_cast<int>(piece));
    }
    if (is_pipelined()) stages()->all_reduce(losses_, ReduceOp::sum, stream);  // the last one's
  } else {
    RunContext c = context(0);
    parts_.model->forward(c, *activations_);
  }
  if (splits_batches())
    parts_.mesh->group({Axis::cp, Axis::tp}).comm()->all_reduce(losses_, ReduceOp::sum, stream);
  const TensorView host = host_losses();
  copy_tensor(host, losses_, stream);
  stream.synchronize();
  return host_value(host, static_cast<int>(Loss::cross_entropy));
}

EvalStats Trainer::evaluate(bool whole, Progress* progress) {
  MOESAIC_CHECK(parts_.valid != nullptr, "no validation data");
  const Phase& phase = phase_of(phases_, std::max<std::int64_t>(1, step_));
  enter_phase(phase);
  backend_->stream().synchronize();  // the batches of the last step may still be read
  std::unique_ptr<data::ValidationSet> all;
  if (whole) {
    all = std::make_unique<data::ValidationSet>(
        parts_.valid, dataset_->sequence_length(), std::numeric_limits<std::int64_t>::max());
  }
  // With experts on several ranks all of them meet in every forward pass; ranks along cp and tp share each of them.
  const bool split = splits_batches();
  return evaluate_windows(
      whole ? *all : *validation_,
      phase.micro_batch_size,
      split ? parts_.mesh->group(Axis::dp).comm() : stage(),
      exchange_ != nullptr || parts_.params->position().extent(Axis::etp) > 1,
      [this](const data::Batch& batch) { return loss_of(batch); },
      progress);
}

}  // namespace moesaic
