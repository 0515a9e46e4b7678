#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y[t] = table[ids[t]].
///
///   ids    [tokens] i32      0 <= id < vocabulary (the data layer refuses others; the op fails the stream)
///   table  [words, d]        f64 | f32 | bf16
///   y      [tokens, d]       any of these types
///
/// The table may be block `block` of a vocabulary of blocks * words: the rows of words of other blocks are then 0, so that
/// the sum over all blocks is the whole table's answer to the bit.
struct EmbeddingForward {
  static constexpr const char* kName = "embedding_forward";
  TensorView y{};
  ConstTensorView ids{};
  ConstTensorView table{};
  std::int64_t block = 0;
  std::int64_t blocks = 1;

  void check() const;
  OpCost cost() const;
  std::int64_t vocabulary() const { return blocks * table.dim(0); }
};

/// dtable[ids[t]] += dy[t], for each row of the table in ascending order of t, whatever the number of threads.
///
///   dtable  [words, d]  acc_t or the type of dy; accumulates; a block as in EmbeddingForward: other blocks' words are left out
struct EmbeddingBackward {
  static constexpr const char* kName = "embedding_backward";
  TensorView dtable{};
  ConstTensorView ids{};
  ConstTensorView dy{};
  std::int64_t block = 0;
  std::int64_t blocks = 1;

  void check() const;
  OpCost cost() const;
  std::int64_t vocabulary() const { return blocks * dtable.dim(0); }
};

void launch(CpuContext& context, const EmbeddingForward& op);
void launch(CpuContext& context, const EmbeddingBackward& op);
void launch(CudaContext& context, const EmbeddingForward& op);
void launch(CudaContext& context, const EmbeddingBackward& op);

}  // namespace moesaic
