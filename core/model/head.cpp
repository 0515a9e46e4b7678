#include "core/model/head.h"

#include <algorithm>

#include "kernels/ops/gemm.h"
#include "kernels/ops/vocab_block.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {
// About 64 MiB of f32 logits at a time, in whole row tiles of the GEMM.
std::int64_t default_rows(std::int64_t words) {
  return std::clamp<std::int64_t>(
      (std::int64_t{16} << 20) / std::max<std::int64_t>(1, words) / 64 * 64, 64, 4096);
}

// Rows [begin, end) of every rank's run of `all`, the runs one after the other.
void take_runs(TensorView out, ConstTensorView all, RowRange of_run, Stream& stream) {
  const std::int64_t count = of_run.end - of_run.begin, runs = out.dim(0) / count,
                     length = all.dim(0) / runs;
  for (std::int64_t r = 0; r < runs; ++r) {
    copy_tensor(out.rows(r * count, (r + 1) * count),
                all.rows(r * length + of_run.begin, r * length + of_run.end),
                stream);
  }
}
}  // namespace

VocabHead::VocabHead(StorageId weight,
                     std::int64_t vocabulary,
                     std::int64_t chunk_rows,
                     const MeshPosition& position)
    : weight_(weight),
      vocabulary_(vocabulary),
      block_(position.coordinate(Axis::tp)),
      blocks_(position.extent(Axis::tp)),
      chunk_rows_(chunk_rows > 0 ? chunk_rows : default_rows(words())) {}

void VocabHead::loss(Tape& tape,
                     const TokenSlices* slices,
                     ConstTensorView n,
                     const Target& target,
                     TensorView dn) const {
  MOESAIC_CHECK((slices != nullptr) == (blocks_ > 1), "words are split where tokens are cut");
  if (slices == nullptr) return loss_of_whole(tape, n, target, dn);
  loss_of_block(tape, *slices, n, target, dn);
}

void VocabHead::loss_of_whole(Tape& tape,
                              ConstTensorView n,
                              const Target& target,
                              TensorView dn) const {
  RunContext& context = tape.context();
  const DType stats = context.params.precision().stats, compute = n.dtype();
  const std::int64_t tokens = n.dim(0),
                     rows = std::min(chunk_rows_, std::max<std::int64_t>(1, tokens));
  const Arena::Mark mark(context.transient);
  const TensorView logits = tape.temp({rows, vocabulary_}, stats, "logits");
  const TensorView dlogits =
      dn.empty() || compute == stats ? logits : tape.temp({rows, vocabulary_}, compute, "d logits");
  const WeightLease w = tape.weight(weight_);
  const TensorView dw = tape.grad(weight_);
  for (std::int64_t begin = 0; begin < tokens; begin += rows) {
    const std::int64_t end = std::min(tokens, begin + rows);
    const TensorView chunk = logits.rows(0, end - begin), dchunk = dlogits.rows(0, end - begin);
    tape.run(linear_forward(chunk, n.rows(begin, end), w.view()));
    tape.run(CrossEntropy{.loss_sum = target.loss_sum,
                          .dlogits = dn.empty() ? TensorView() : dchunk,
                          .logits = chunk,
                          .targets = target.targets.rows(begin, end),
                          .divisor = target.divisor,
                          .grad_scale = target.scale});
    if (dn.empty()) continue;
    tape.run(linear_backward_input(dn.rows(begin, end), dchunk, w.view()));
    // Not put off: the chunk is overwritten next.
    if (!dw.empty()) tape.run(linear_backward_weight(dw, dchunk, n.rows(begin, end)));
  }
}

void VocabHead::loss_of_block(Tape& tape,
                              const TokenSlices& slices,
                              ConstTensorView own_n,
                              const Target& target,
                              TensorView own_dn) const {
  RunContext& context = tape.context();
  Stream& stream = tape.stream();
  const DType stats = context.params.precision().stats, compute = own_n.dtype();
  const std::int64_t own = own_n.dim(0),
                     run = std::clamp<std::int64_t>(
                         chunk_rows_ / blocks_, 1, std::max<std::int64_t>(1, own)),
                     rows = run * blocks_;
  const Arena::Mark mark(context.transient);
  const TensorView n = tape.temp({rows, own_n.dim(1)}, compute, "head's input, a chunk"),
                   targets = tape.temp({rows}, DType::i32, "targets, a chunk"),
                   logits = tape.temp({rows, words()}, stats, "logits"),
                   sums = tape.temp({rows, 2}, stats, "logits' sums"),
                   all_sums = tape.temp({blocks_ * rows, 2}, stats, "logits' sums, all blocks");
  const TensorView dlogits =
      own_dn.empty() || compute == stats ? logits : tape.temp({rows, words()}, compute, "d logits");
  const WeightLease w = tape.weight(weight_);
  const TensorView dw = tape.grad(weight_);
  for (std::int64_t begin = 0; begin < own; begin += run) {
    const std::int64_t end = std::min(own, begin + run), count = (end - begin) * blocks_;
    const TensorView chunk_n = n.rows(0, count), chunk = logits.rows(0, count),
                     dchunk = dlogits.rows(0, count), chunk_targets = targets.rows(0, count),
                     chunk_sums = all_sums.rows(0, blocks_ * count);
    slices.gather(chunk_n, own_n.rows(begin, end), stream);
    take_runs(chunk_targets, target.targets, {begin, end}, stream);
    tape.run(linear_forward(chunk, chunk_n, w.view()));
    tape.run(VocabBlockSums{.sums = sums.rows(0, count), .logits = chunk});
    slices.gather(chunk_sums, sums.rows(0, count), stream);
    tape.run(VocabBlockCrossEntropy{.loss_sum = target.loss_sum,
                                    .dlogits = own_dn.empty() ? TensorView() : dchunk,
                                    .logits = chunk,
                                    .sums = chunk_sums.reshaped({blocks_, count, 2}),
                                    .targets = chunk_targets,
                                    .divisor = target.divisor,
                                    .block = block_,
                                    .grad_scale = target.scale});
    if (own_dn.empty()) continue;
    if (!dw.empty()) tape.run(linear_backward_weight(dw, dchunk, chunk_n));
    // n has been read: its memory takes this block's share of dn.
    tape.run(linear_backward_input(chunk_n, dchunk, w.view()));
    slices.sum_to_own(own_dn.rows(begin, end), chunk_n, stream);
  }
}

void VocabHead::log_probabilities(RunContext& context,
                                  ConstTensorView n,
                                  ConstTensorView targets,
                                  TensorView logp) const {
  MOESAIC_CHECK(blocks_ == 1, "the head is split");
  const DType stats = context.params.precision().stats;
  const std::int64_t tokens = n.dim(0),
                     rows = std::min(chunk_rows_, std::max<std::int64_t>(1, tokens));
  const Arena::Mark mark(context.transient);
  const TensorView logits = context.transient.take(Shape{rows, vocabulary_}, stats, "logits");
  const TensorView sum = context.transient.take(Shape{1}, stats, "loss, not used");
  const WeightLease w = context.params.acquire(weight_, stream_of(context.backend));
  for (std::int64_t begin = 0; begin < tokens; begin += rows) {
    const std::int64_t end = std::min(tokens, begin + rows);
    const TensorView chunk = logits.rows(0, end - begin);
    run(context.backend, linear_forward(chunk, n.rows(begin, end), w.view()));
    run(context.backend,
        CrossEntropy{.loss_sum = sum,
                     .logp = logp.rows(begin, end),
                     .logits = chunk,
                     .targets = targets.rows(begin, end)});
  }
}

void VocabHead::logits(RunContext& context, ConstTensorView n, TensorView out) const {
  MOESAIC_CHECK(blocks_ == 1, "the head is split");
  const WeightLease w = context.params.acquire(weight_, stream_of(context.backend));
  run(context.backend, linear_forward(out, n, w.view()));
}

}  // namespace moesaic
