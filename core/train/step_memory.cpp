#include "core/train/step_memory.h"

#include <algorithm>
#include <deque>

#include "core/model/pipeline_plan.h"
#include "core/nn/losses.h"
#include "core/train/balance_update.h"
#include "core/train/expert_exchange.h"
#include "core/train/expert_updates.h"
#include "core/train/member_reduction.h"
#include "core/train/sequence_buffers.h"
#include "core/train/token_groups.h"
#include "kernels/backend.h"
#include "parallel/pipeline/executor.h"

namespace moesaic {
namespace {

// Addresses that are never read: a dry stream drops all work.
TensorView pretend(Shape shape, DType dtype, Device device) {
  return {reinterpret_cast<std::byte*>(std::uintptr_t{1} << 41), dtype, shape, device};
}

// The piece of a micro-batch in one document with all others where `pieces` are more than one: then everything that
// crossing documents ask for takes place.
Sequence pretend_sequence(std::int64_t tokens,
                          std::int64_t documents,
                          bool mtp,
                          SequenceBuffers::Piece piece,
                          Device device) {
  Sequence s;
  s.tokens = s.targets = s.positions = pretend({tokens}, DType::i32, device);
  s.cu = pretend({documents + 1}, DType::i32, device);
  if (piece.count > 1) s.keys = s.batch = s.cu;
  s.links = {.rank = piece.index, .first = 0, .last = piece.count - 1, .last_tokens = tokens};
  if (piece.in_turn) {  // the last one, which sees most, as if another came behind it
    s.links.last = piece.count;
  } else if (const int partner = piece.count - 1 - piece.index; partner != piece.index) {
    s.links.loan = {.partner = partner, .rows = tokens};
    s.lent = s.cu;
  }
  if (mtp) s.mtp_tokens = s.mtp_targets = s.tokens;
  return s;
}

std::size_t bytes_of_slots(const Model& model, const std::vector<int>& slots) {
  if (slots.empty()) return model.slot_bytes();
  std::size_t bytes = 0;
  for (int c = 0; c < model.num_chunks(); ++c)
    bytes += static_cast<std::size_t>(slots[static_cast<std::size_t>(c)]) * model.slot_bytes(c);
  return bytes;
}

std::vector<TensorView> pretend_parts(const Model& model, int chunk, Device device) {
  std::vector<TensorView> parts;
  for (const std::size_t bytes : model.offloaded_parts(chunk))
    parts.push_back(pretend({static_cast<std::int64_t>(bytes)}, DType::u8, device));
  return parts;
}

// A chunk's passes, with bundles of somebody else. Of several pieces in turn the last one, which sees most.
void pass_chunk(Model& model, RunContext& context, TensorView slot, int chunk, bool with_backward) {
  const Device device = context.params.device();
  const Precision& precision = context.params.precision();
  const Shape shape{model.own_tokens(), model.options().hidden};
  const TensorView cur = pretend(shape, precision.compute, device),
                   gradient = pretend(shape, precision.stats, device);
  std::deque<Model::MicroBatch> pieces;  // which stay where they are
  const auto num_pieces = context.piece_sums.empty() ? 1 : context.sequence.links.rank + 1;
  for (int i = 0; i < num_pieces; ++i) {
    Model::MicroBatch& piece = pieces.emplace_back(
        model.make_micro_batch(slot, chunk, pretend_parts(model, chunk, device)));
    if (i > 0) model.follow(piece, pieces[static_cast<std::size_t>(i) - 1]);
  }
  Model::MicroBatch& batch = pieces.back();
  const std::vector<ConstTensorView> bank(static_cast<std::size_t>(model.snapshots_before(chunk)),
                                          cur);
  const std::vector<TensorView> dbank(static_cast<std::size_t>(model.snapshots_after(chunk)),
                                      gradient);
  for (const auto& named : model.moe_layers())
    named.moe->reset_margins();
  model.forward_chunk(context, batch, {cur, bank});
  if (with_backward) model.backward_chunk(context, batch, cur, dbank);
}

// Both parts of a split backward.
std::size_t measure_deferred(Model& model, const RunContext& like, TensorView slot, int chunk) {
  Arena kept = Arena::measuring(like.params.device(), "deferred");
  WeightGradients deferred(WeightGradients::Mode::deferred);
  RunContext context{like.backend,
                     like.params,
                     kept,
                     deferred,
                     like.sequence,
                     like.step_scalars,
                     like.losses,
                     true,
                     {}};
  pass_chunk(model, context, slot, chunk, true);
  deferred.flush(like.backend);
  return kept.high_water_bytes();
}

}  // namespace

StepMemory measure_step(Model& model,
                        ParameterStore& params,
                        Optimizer* optimizer,
                        Device device,
                        int num_threads,
                        const StepExtents& extents,
                        const RecomputePolicy& policy,
                        KernelPath path) {
  const std::int64_t tokens = extents.tokens;
  const TokenGroups groups(params.position(), nullptr);
  const auto dry = [&](const char* name) {
    return BackendOwner::Options{.device = device,
                                 .mode = Stream::Mode::dry,
                                 .num_threads = num_threads,
                                 .scratch_bytes = 0,
                                 .name = name,
                                 .path = path};
  };
  BackendOwner side(dry("dry exchange"));
  if (extents.overlap && extents.exchange != nullptr) extents.exchange->set_side(&side.backend());
  Bounds bounds = groups.bounds(tokens, extents.sequence, extents.exchange);
  bounds.pieces = extents.pieces;
  model.plan(bounds, policy);
  SequenceBuffers::Piece piece{params.position().coordinate(Axis::cp),
                               params.position().extent(Axis::cp)};
  if (extents.pieces > 1) {
    const auto pieces = static_cast<int>(extents.pieces);
    piece = {.index = pieces - 1, .count = pieces, .in_turn = true};
  }
  const Precision& precision = params.precision();
  StepMemory memory;
  memory.slot = bytes_of_slots(model, extents.slots);
  memory.piece_sums = extents.pieces > 1 ? std::max<std::size_t>(model.piece_sum_bytes(), 256) : 0;
  if (const auto offload = ActivationOffload::make(model, extents.passes)) {
    memory.offload = offload->plan().device_bytes;
    memory.offload_host = offload->plan().host_bytes;
    const auto rounds = static_cast<std::size_t>(extents.rounds);
    memory.offload_out = rounds * offload->plan().bytes_out;
    memory.offload_in = rounds * offload->plan().bytes_in;
  }
  BackendOwner owner(dry("dry run"));
  Arena transient = Arena::measuring(device, "transient");
  const TensorView slot = pretend({static_cast<std::int64_t>(memory.slot)}, DType::u8, device);
  const TensorView losses = pretend({kNumLosses}, precision.stats, device),
                   scalars = pretend({kNumStepScalars}, precision.master, device);
  for (const auto& named : model.moe_layers()) {
    const std::int64_t experts = named.moe->options().experts;
    const TensorView margins = pretend({extents.step_tokens, experts}, precision.stats, device);
    named.moe->set_margins(margins, margins);
  }
  // The number of documents in a micro-batch is data: the extremes bound what ops take.
  for (const std::int64_t documents :
       {std::int64_t{1}, std::max<std::int64_t>(1, extents.most_documents)}) {
    const Sequence sequence =
        pretend_sequence(bounds.tokens, documents, extents.mtp, piece, device);
    WeightGradients at_once;
    RunContext context{owner.backend(),
                       params,
                       transient,
                       at_once,
                       sequence,
                       scalars,
                       losses,
                       optimizer != nullptr};
    if (memory.piece_sums > 0)
      context.piece_sums =
          pretend({static_cast<std::int64_t>(memory.piece_sums)}, DType::u8, device);
    if (extents.slots.empty()) {
      Model::MicroBatch batch = model.make_micro_batch(slot, 0, pretend_parts(model, 0, device));
      model.forward(context, batch);
      if (optimizer != nullptr) model.backward(context, batch);
    } else {
      for (int c = 0; c < model.num_chunks(); ++c) {
        pass_chunk(model, context, slot, c, optimizer != nullptr);
        if (optimizer != nullptr && extents.splits_backward)
          memory.deferred = std::max(memory.deferred, measure_deferred(model, context, slot, c));
      }
    }
    for (const auto& named : model.moe_layers())
      named.moe->reset_margins();
  }
  if (optimizer != nullptr) {
    MemberReduction members(params, nullptr);
    members.reduce(owner.backend(), [&](StorageId id, std::int64_t m, const TensorView& gradient) {
      optimizer->gradient_final(owner.backend(), id, m, gradient);
    });
    members.gather_weights(owner.backend(), true);
    optimizer->clip(owner.backend(), losses);
    optimizer->update(owner.backend());
    if (ExpertUpdates::can_run_beside(params, *optimizer)) {
      BackendOwner beside(dry("dry updates"));
      optimizer->update_experts(beside.backend());
      memory.updates = std::max<std::size_t>(beside.scratch().high_water_bytes(), 4096);
      memory.update_streams = ExpertUpdates::streams_on(device);
    } else {
      optimizer->update_experts(owner.backend());
    }
    optimizer->qk_clip(owner.backend(), model.mla_layers());
    optimizer->average(owner.backend());
    update_balance(owner.backend(), params, model.moe_layers(), scalars, nullptr);
  }
  for (const auto& named : model.moe_layers())
    named.moe->set_margins({}, {});
  memory.scratch = std::max<std::size_t>(owner.scratch().high_water_bytes(), 4096);
  memory.exchange = side.scratch().high_water_bytes();
  if (extents.exchange != nullptr) extents.exchange->set_side(nullptr);
  memory.transient = std::max<std::size_t>(transient.high_water_bytes(), 4096);
  return memory;
}

StepMemory measure_run(const config::Config& config,
                       const std::vector<Phase>& phases,
                       std::span<const data::DocumentBound> documents,
                       Model& model,
                       ParameterStore& params,
                       Optimizer* optimizer,
                       Device device,
                       const RecomputePolicy& policy,
                       KernelPath path,
                       int ranks_per_node) {
  StepMemory most;
  const MeshPosition& position = params.position();
  const int stage = position.coordinate(Axis::pp);
  // Evaluation and generation hold the model in one piece.
  const bool walks_chunks = position.extent(Axis::pp) > 1 || model.num_chunks() > 1;
  const PipelineLayout layout = walks_chunks ? pipeline_layout(config) : PipelineLayout();
  for (const Phase& phase : phases) {
    // Dense attention needs other temporaries than sparse.
    model.set_sparse_stage(phase.sparse);
    std::int64_t most_documents = 0;
    for (const auto& bound : documents)
      most_documents =
          std::max(most_documents, bound.in(phase.micro_batch_size, phase.sequence_length));
    const auto exchange = make_expert_exchange(config,
                                               phase,
                                               params.precision(),
                                               params.position(),
                                               ranks_per_node,
                                               nullptr,
                                               params.wants_member_rows());
    std::vector<int> slots;
    StepPasses passes = StepPasses::of_one_chunk();
    bool splits_backward = false;
    if (walks_chunks) {
      const pipeline::Schedule schedule =
          pipeline_schedule(config, phase.micro_batches(position.extent(Axis::dp)), phase.pieces);
      const auto needs = pipeline::Executor::needs(
          schedule,
          layout.bundles(
              model.options(),
              params.precision(),
              phase.piece_tokens() / (position.extent(Axis::cp) * position.extent(Axis::tp))),
          stage);
      passes = StepPasses::of_schedule(schedule, needs, stage);
      slots = passes.slots;
      most.bundles = std::max(most.bundles, needs.bytes);
      const int deferred =
          pipeline::count_slots(schedule).deferred[static_cast<std::size_t>(stage)];
      splits_backward = deferred > 0;
      most.num_deferred = std::max(most.num_deferred, deferred);
    }
    const StepMemory m =
        measure_step(model,
                     params,
                     optimizer,
                     device,
                     static_cast<int>(config.run.threads),
                     {.tokens = phase.piece_tokens(),
                      .pieces = phase.pieces,
                      .sequence = phase.sequence_length,
                      .step_tokens = phase.step_tokens(),
                      .most_documents = most_documents,
                      .mtp = config.model.mtp.num_nextn_predict_layers > 0,
                      .exchange = exchange.get(),
                      .slots = slots,
                      .passes = passes,
                      .rounds = walks_chunks ? 1 : phase.micro_batches(position.extent(Axis::dp)),
                      .splits_backward = splits_backward,
                      .overlap = config.dispatch.overlap},
                     policy,
                     path);
    most.scratch = std::max(most.scratch, m.scratch);
    most.exchange = std::max(most.exchange, m.exchange);
    most.updates = std::max(most.updates, m.updates);
    most.update_streams = std::max(most.update_streams, m.update_streams);
    most.transient = std::max(most.transient, m.transient);
    most.slot = std::max(most.slot, m.slot);
    most.deferred = std::max(most.deferred, m.deferred);
    most.piece_sums = std::max(most.piece_sums, m.piece_sums);
    most.offload = std::max(most.offload, m.offload);
    most.offload_host = std::max(most.offload_host, m.offload_host);
    most.offload_out = std::max(most.offload_out, m.offload_out);
    most.offload_in = std::max(most.offload_in, m.offload_in);
  }
  return most;
}

std::size_t losses_bytes(const Model& model) {
  return static_cast<std::size_t>(model.loss_rows() + 1) * kNumLosses * 8;
}

StepBuffers step_buffers(const std::vector<Phase>& phases,
                         Model& model,
                         const ParameterStore& params,
                         int ranks) {
  StepBuffers sizes;
  std::int64_t experts = 0;  // over all layers with the exact rule
  for (const auto& named : model.moe_layers()) {
    const MoeOptions& o = named.moe->options();
    experts += o.bias_rule == BiasRule::quantile_exact ? o.experts : 0;
  }
  for (const Phase& phase : phases) {
    const auto batches = static_cast<std::size_t>(phase.passes(ranks)) *
                         SequenceBuffers::bytes_for(
                             phase.micro_batch_tokens(),
                             static_cast<int>(params.position().extent(Axis::cp) * phase.pieces));
    const auto margins = static_cast<std::size_t>(phase.step_tokens() * experts) *
                         byte_size(params.precision().stats);
    sizes.batches = std::max(sizes.batches, batches);
    sizes.margins = std::max(sizes.margins, margins);
  }
  return sizes;
}

}  // namespace moesaic
