#include "core/model/head.h"

#include <algorithm>

#include "kernels/ops/gemm.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic {
namespace {
// About 64 MiB of f32 logits at a time, in whole row tiles of the GEMM.
std::int64_t default_rows(std::int64_t vocabulary) {
  return std::clamp<std::int64_t>(
      (std::int64_t{16} << 20) / std::max<std::int64_t>(1, vocabulary) / 64 * 64, 64, 4096);
}
}  // namespace

VocabHead::VocabHead(StorageId weight, std::int64_t vocabulary, std::int64_t chunk_rows)
    : weight_(weight),
      vocabulary_(vocabulary),
      chunk_rows_(chunk_rows > 0 ? chunk_rows : default_rows(vocabulary)) {}

void VocabHead::loss(Tape& tape, ConstTensorView n, const Target& target, TensorView dn) const {
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

void VocabHead::log_probabilities(RunContext& context,
                                  ConstTensorView n,
                                  ConstTensorView targets,
                                  TensorView logp) const {
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
  const WeightLease w = context.params.acquire(weight_, stream_of(context.backend));
  run(context.backend, linear_forward(out, n, w.view()));
}

}  // namespace moesaic
