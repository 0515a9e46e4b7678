#include "kernels/ops/embedding.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {
void check_block(std::int64_t block, std::int64_t blocks) {
  MOESAIC_CHECK(0 <= block && block < blocks, "no such block of the vocabulary");
}
}  // namespace

void EmbeddingForward::check() const {
  MOESAIC_CHECK(table.rank() == 2 && ids.rank() == 1,
                "table must be [words, d] and ids [tokens]");
  check_block(block, blocks);
  check_dtype(ids, DType::i32, "ids");
  check_shape(y, {ids.dim(0), table.dim(1)}, "y");
}
OpCost EmbeddingForward::cost() const {
  return {0.0, 2.0 * total_bytes({y}) + total_bytes({ids})};
}

void EmbeddingBackward::check() const {
  MOESAIC_CHECK(dtable.rank() == 2 && ids.rank() == 1,
                "dtable must be [words, d] and ids [tokens]");
  check_block(block, blocks);
  check_dtype(ids, DType::i32, "ids");
  check_shape(dy, {ids.dim(0), dtable.dim(1)}, "dy");
  if (dtable.dtype() != dy.dtype()) check_dtype(dtable, acc_dtype(dy.dtype()), "dtable");
}
OpCost EmbeddingBackward::cost() const {
  return {static_cast<double>(dy.numel()), 3.0 * total_bytes({dy}) + total_bytes({ids})};
}

}  // namespace moesaic
