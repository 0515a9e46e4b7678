#include "core/model/embedding.h"

#include "kernels/ops/embedding.h"

namespace moesaic {

TokenEmbedding::TokenEmbedding(StorageId table, const MeshPosition& position)
    : table_(table), block_(position.coordinate(Axis::tp)), blocks_(position.extent(Axis::tp)) {}

void TokenEmbedding::forward(Tape& tape,
                             const TokenSlices* slices,
                             ConstTensorView ids,
                             TensorView y) const {
  MOESAIC_CHECK((slices != nullptr) == (blocks_ > 1), "words are split where tokens are cut");
  const WeightLease table = tape.weight(table_);
  EmbeddingForward op{
      .y = y, .ids = ids, .table = table.view(), .block = block_, .blocks = blocks_};
  if (slices == nullptr) return tape.run(op);
  const TensorView share =
      tape.temp({ids.dim(0), y.dim(1)}, y.dtype(), "embedding's share, all tokens");
  op.y = share;
  tape.run(op);
  slices->sum_to_own(y, share, tape.stream());
}

void TokenEmbedding::backward(Tape& tape,
                              const TokenSlices* slices,
                              ConstTensorView ids,
                              ConstTensorView dy) const {
  const TensorView dtable = tape.grad(table_);
  if (dtable.empty()) return;
  EmbeddingBackward op{.dtable = dtable, .ids = ids, .dy = dy, .block = block_, .blocks = blocks_};
  if (slices == nullptr) return tape.run(op);
  const TensorView all = tape.temp({ids.dim(0), dy.dim(1)}, dy.dtype(), "d embedding, all tokens");
  slices->gather(all, dy, tape.stream());
  op.dy = all;
  tape.run(op);
}

}  // namespace moesaic
