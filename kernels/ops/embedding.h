#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y[t] = table[ids[t]].
///
///   ids    [tokens] i32      0 <= id < vocabulary (the data layer refuses others; the op fails the stream)
///   table  [vocabulary, d]   f64 | f32 | bf16
///   y      [tokens, d]       any of these types
struct EmbeddingForward {
  static constexpr const char* kName = "embedding_forward";
  TensorView y{};
  ConstTensorView ids{};
  ConstTensorView table{};

  void check() const;
  OpCost cost() const;
};

/// dtable[ids[t]] += dy[t], for each row of the table in ascending order of t, whatever the number of threads.
///
///   dtable  [vocabulary, d]  acc_t or the type of dy; accumulates
struct EmbeddingBackward {
  static constexpr const char* kName = "embedding_backward";
  TensorView dtable{};
  ConstTensorView ids{};
  ConstTensorView dy{};

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const EmbeddingForward& op);
void launch(CpuContext& context, const EmbeddingBackward& op);
void launch(CudaContext& context, const EmbeddingForward& op);
void launch(CudaContext& context, const EmbeddingBackward& op);

}  // namespace moesaic
