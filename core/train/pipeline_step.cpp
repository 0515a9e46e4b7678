#include "core/train/pipeline_step.h"

#include <algorithm>

#include "kernels/ops/elementwise.h"
#include "parallel/pipeline/simulate.h"

namespace moesaic {
namespace {
std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}
}  // namespace

PipelineStep::PipelineStep(Parts parts)
    : parts_(std::move(parts)),
      messages_(parts_.params->device(), "pipeline messages", parts_.mode),
      ready_(parts_.params->device()),
      exchanged_(parts_.params->device()),
      executor_(
          parts_.schedule, parts_.bundles, parts_.comm, stream_of(*parts_.backend), messages_) {
  make_slots();
  make_evaluation();
  const int deferred = pipeline::count_slots(parts_.schedule).deferred[at(stage())];
  MOESAIC_CHECK(deferred <= static_cast<int>(parts_.deferred.size()),
                "a split backward needs more arenas than there are");
  for (int i = 0; i < deferred; ++i)
    deferred_.push_back(std::make_unique<WeightGradients>(WeightGradients::Mode::deferred));
  deferred_in_use_.resize(deferred_.size());
  const pipeline::Placement& placement = parts_.schedule.placement;
  const ModelOptions& options = parts_.model->options();
  const bool is_end = parts_.model->embedding().valid();
  if (is_end && (options.mtp || options.tie_embeddings) &&
      placement.rank_of(0) != placement.rank_of(placement.num_chunks() - 1)) {
    const TensorView table = parts_.params->storage_weight(parts_.model->embedding());
    const DType dtype = parts_.params->precision().grad;
    copy_memory_ = Buffer(static_cast<std::size_t>(table.numel()) * byte_size(dtype),
                          parts_.params->device(),
                          "gradient of the embedding's copy");
    gradient_of_copy_ = copy_memory_.view(table.shape(), dtype);
  }
}

void PipelineStep::make_slots() {
  std::int64_t begin = 0;
  const auto& chunks = parts_.schedule.placement.chunks_of(stage());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const int chunk = static_cast<int>(i);
    const auto bytes = static_cast<std::int64_t>(parts_.model->slot_bytes(chunk));
    auto& slots = activations_.emplace_back();
    for (int s = 0; s < executor_.slots(chunks[i]); ++s, begin += bytes) {
      const std::vector<TensorView> offloaded =
          parts_.offloaded ? parts_.offloaded(chunk, s) : std::vector<TensorView>();
      slots.push_back(parts_.model->make_micro_batch(
          parts_.slots.rows(begin, begin + bytes), chunk, offloaded));
    }
  }
}

// What evaluation receives: a sum for each chunk, and every snapshot.
void PipelineStep::make_evaluation() {
  const auto& cur = parts_.bundles.cur();
  const auto& snapshot = parts_.bundles.snapshot();
  const pipeline::Placement& placement = parts_.schedule.placement;
  const auto& chunks = placement.chunks_of(stage());
  if (placement.stages() == 1) return;
  const auto sums = chunks.size();
  const auto snapshots = at(parts_.bundles.num_snapshots());
  const auto bytes = [](const pipeline::BundleTensor& t) {
    return static_cast<std::size_t>(t.bytes(pipeline::Payload::activation));
  };
  evaluation_memory_ = Buffer(sums * bytes(cur) + snapshots * bytes(snapshot),
                              parts_.params->device(),
                              "bundles of evaluation");
  std::size_t begin = 0;
  for (std::size_t i = 0; i < sums; ++i, begin += bytes(cur))
    received_.push_back(evaluation_memory_.view(cur.shape, cur.dtype, begin));
  for (std::size_t i = 0; i < snapshots; ++i, begin += bytes(snapshot))
    received_bank_.push_back(evaluation_memory_.view(snapshot.shape, snapshot.dtype, begin));
}

int PipelineStep::chunk_here(int chunk) const {
  const auto& chunks = parts_.schedule.placement.chunks_of(stage());
  return static_cast<int>(std::find(chunks.begin(), chunks.end(), chunk) - chunks.begin());
}

Model::MicroBatch& PipelineStep::activations(int chunk, int slot) {
  return activations_[at(chunk_here(chunk))][at(slot)];
}

void PipelineStep::run(const std::function<void(StorageId)>& gradients_final,
                       const std::function<void()>& forwards_done) {
  gradients_final_ = gradients_final;
  forwards_done_ = forwards_done;
  const pipeline::Schedule& schedule = parts_.schedule;
  backwards_left_.assign(schedule.placement.chunks_of(stage()).size(),
                         schedule.sizes.micro_batches);
  slots_.assign(schedule.placement.chunks_of(stage()).size(),
                std::vector<int>(at(schedule.sizes.micro_batches), 0));
  part_ = StepPart::other;
  executor_.run(*this);
}

// Between passes the stream may wait for messages; one stage has none.
void PipelineStep::does(StepPart part) {
  const bool may_wait = parts_.schedule.placement.stages() > 1;
  if (part_ == part || (part == StepPart::communication && !may_wait)) return;
  part_ = part;
  parts_.timer->stream_does(part);
}

pipeline::ForwardResult PipelineStep::forward(const pipeline::ForwardCall& call) {
  does(StepPart::forward);
  slots_[at(chunk_here(call.chunk))][at(call.micro_batch)] = call.slot;
  follow(call.chunk, call.micro_batch, call.slot);
  RunContext context = parts_.context(call.micro_batch, *parts_.transient, at_once_);
  const Model::Bundle out = parts_.model->forward_chunk(
      context, activations(call.chunk, call.slot), {call.cur, call.bank});
  does(StepPart::communication);
  const auto taken_before = static_cast<std::ptrdiff_t>(call.bank.size());
  return {out.cur, {out.bank.begin() + taken_before, out.bank.end()}};
}

int PipelineStep::take_deferred(Pair pair) {
  const auto free = std::find(deferred_in_use_.begin(), deferred_in_use_.end(), false);
  MOESAIC_CHECK(free != deferred_in_use_.end(), "more split backwards than planned");
  *free = true;
  const int i = static_cast<int>(free - deferred_in_use_.begin());
  deferred_of_[pair] = i;
  return i;
}

// Gradients are final from a chunk on when those of the chunks behind it are.
bool PipelineStep::is_last_backward(int chunk) {
  const auto here = backwards_left_.begin() + chunk_here(chunk);
  --*here;
  return std::all_of(here, backwards_left_.end(), [](int left) { return left == 0; });
}

void PipelineStep::backward(const pipeline::BackwardCall& call) {
  does(StepPart::backward);
  pass_back(call);
  does(StepPart::communication);
}

void PipelineStep::pass_back(const pipeline::BackwardCall& call) {
  const Pair pair{call.chunk, call.micro_batch};
  if (call.part == pipeline::Work::backward_weight) {
    const auto it = deferred_of_.find(pair);
    deferred_[at(it->second)]->flush(*parts_.backend);
    deferred_in_use_[at(it->second)] = false;
    deferred_of_.erase(it);
    is_last_backward(call.chunk);
    return;
  }
  Model::MicroBatch& batch = activations(call.chunk, call.slot);
  if (call.chunk == last_chunk() && parts_.schedule.kind == pipeline::Kind::vertical)
    batch.mtp_gradient = activations(0, slots_[0][at(call.micro_batch)]).mtp_gradient;
  if (call.part == pipeline::Work::backward_input) {
    const auto i = at(take_deferred(pair));
    RunContext context = parts_.context(call.micro_batch, *parts_.deferred[i], *deferred_[i]);
    parts_.model->backward_chunk(context, batch, call.dcur, call.dbank);
    return;
  }
  RunContext context = parts_.context(call.micro_batch, *parts_.transient, at_once_);
  if (is_last_backward(call.chunk)) {
    if (forwards_done_) std::exchange(forwards_done_, {})();
    context.gradients_final = gradients_final_;
  }
  parts_.model->backward_chunk(context, batch, call.dcur, call.dbank);
}

void PipelineStep::add(TensorView sum, ConstTensorView value) {
  moesaic::run(*parts_.backend, Accumulate{.y = sum, .x = value});
}

void PipelineStep::add_gradients_of_copies() {
  if (gradient_of_copy_.empty()) return;
  const TensorView gradient = parts_.params->grad(parts_.model->embedding());
  if (gradient.empty()) return;  // frozen, on both stages
  const pipeline::Placement& placement = parts_.schedule.placement;
  const int first = placement.rank_of(0), last = placement.rank_of(placement.num_chunks() - 1);
  const int peer = stage() == first ? last : first;
  Stream& main = stream_of(*parts_.backend);
  main.record(ready_);
  messages_.wait(ready_);
  const OutgoingMessage sent{gradient, peer};
  const IncomingMessage received{gradient_of_copy_, peer};
  parts_.comm->exchange({&sent, 1}, {&received, 1}, messages_);
  messages_.record(exchanged_);
  main.wait(exchanged_);
  moesaic::run(*parts_.backend, Accumulate{.y = gradient, .x = gradient_of_copy_});
}

// A piece of a micro-batch is the next one's predecessor. Where one slot is enough for all, none reads another.
void PipelineStep::follow(int chunk, int micro_batch, int slot) {
  if (micro_batch % parts_.schedule.sizes.pieces == 0) return;
  const int before = slots_[at(chunk_here(chunk))][at(micro_batch - 1)];
  if (before != slot) parts_.model->follow(activations(chunk, slot), activations(chunk, before));
}

void PipelineStep::evaluate(RunContext& context, int piece) {
  Model::Bundle bundle;
  for (const int chunk : parts_.schedule.placement.chunks_of(stage())) {
    bundle = receive(chunk, std::move(bundle));
    const int slot = std::min(piece, executor_.slots(chunk) - 1);
    if (slot > 0) parts_.model->follow(activations(chunk, slot), activations(chunk, slot - 1));
    bundle = parts_.model->forward_chunk(context, activations(chunk, slot), bundle);
    send(chunk, bundle);
  }
}

// `bundle`: after the chunk of this stage before, which holds the snapshots that have been here already.
Model::Bundle PipelineStep::receive(int chunk, Model::Bundle bundle) {
  if (chunk == 0 || !parts_.schedule.placement.is_crossed(chunk - 1)) return bundle;
  const int peer = parts_.schedule.placement.rank_of(chunk - 1);
  bundle.cur = received_[at(chunk_here(chunk))];
  std::vector<IncomingMessage> messages{{received_[at(chunk_here(chunk))], peer}};
  bundle.bank.resize(at(parts_.bundles.snapshots_before(chunk)));
  for (const int j : parts_.bundles.carried(chunk - 1)) {
    bundle.bank[at(j)] = received_bank_[at(j)];
    messages.push_back({received_bank_[at(j)], peer});
  }
  parts_.comm->exchange({}, messages, stream_of(*parts_.backend));
  return bundle;
}

void PipelineStep::send(int chunk, const Model::Bundle& bundle) {
  const pipeline::Placement& placement = parts_.schedule.placement;
  if (chunk + 1 == placement.num_chunks() || !placement.is_crossed(chunk)) return;
  const int peer = placement.rank_of(chunk + 1);
  std::vector<OutgoingMessage> messages{{bundle.cur, peer}};
  for (const int j : parts_.bundles.carried(chunk))
    messages.push_back({bundle.bank[at(j)], peer});
  parts_.comm->exchange(messages, {}, stream_of(*parts_.backend));
}

}  // namespace moesaic
