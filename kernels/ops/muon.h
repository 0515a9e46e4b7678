#pragma once
#include <cstdint>
#include <vector>

#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

/// Rows [begin, end) of a matrix.
struct RowBlock {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const RowBlock&) const = default;
};

/// The row blocks of a projection of `num_heads` heads, one after the other, each head cut into
/// parts of these heights: {128} for query, key and value, {128, 128} for key and value parts of
/// kv_b_proj.
std::vector<RowBlock> head_row_blocks(std::int64_t num_heads,
                                      const std::vector<std::int64_t>& heights);

/// One Muon update of `batch` matrices of one shape:
///   g = clip_factor dw;   M <- mu M + g;   u = g + mu M (nesterov) or M
///   per row block of u:  X = u / (|u|_F + 1e-7), in the orientation with rows <= columns
///       num_iterations times:  Y = X X^T;  X <- 3.4445 X + (-4.7750 Y + 2.0315 Y^2) X
///   w <- (1 - lr weight_decay weight_decay_scale) w - lr 0.2 sqrt(max(block rows, cols)) X,   lr =
///   learning_rate lr_scale w_compute <- w, rounded
/// with clip_factor, learning_rate, weight_decay_scale and skip from `scalars`.
///
///   w, momentum  [batch, rows, cols] or [rows, cols], f64 | f32 (the master dtype, also the type
///   of the arithmetic);
///                updated in place
///   dw           the same shape; master dtype, or bf16 next to f32; read only
///   w_compute    the same shape; master dtype, or bf16 next to f32; empty = none wanted
///   remainder    the same shape, u16, or empty. When given, the f32 master is the pair (w_compute, remainder) of
///   core/base/split_float.h, updated in place: w is empty and w_compute, bf16, is required
///   scalars      [kNumStepScalars], master dtype
///   blocks       row ranges that follow each other and cover all rows, each orthogonalised on its
///   own (per head);
///                empty = one block
///
/// With skip != 0 nothing is written. No two tensors overlap. Matrices go through in groups of
/// fixed size, products in fixed row tiles: the bits of a matrix depend neither on the batch nor on
/// threads. Where the sizes allow, the CUDA backend forms f32 products from two bf16 halves per number
/// (about 17 bits), or, with bf16_products, runs the iteration in bf16 with sums in f32; the CPU backend
/// keeps to the master dtype. Source: Liu et al., Muon is Scalable for LLM Training, arXiv:2502.16982; SPEC 7.2
/// and 7.3.
struct MuonUpdate {
  static constexpr const char* kName = "muon_update";
  TensorView w = {};
  TensorView momentum;
  TensorView w_compute = {};
  TensorView remainder = {};
  ConstTensorView dw;
  ConstTensorView scalars;
  std::vector<RowBlock> blocks;
  double lr_scale = 1;
  double weight_decay = 0;
  double mu = 0.95;
  bool nesterov = true;
  int num_iterations = 5;
  bool bf16_products = false;  ///< allows the iteration in bf16; f32 masters only

  bool is_split() const { return !remainder.empty(); }
  DType master_dtype() const { return momentum.dtype(); }
  std::int64_t batch() const { return momentum.rank() == 3 ? momentum.dim(0) : 1; }
  std::int64_t rows() const { return momentum.dim(momentum.rank() - 2); }
  std::int64_t cols() const { return momentum.dim(momentum.rank() - 1); }
  void check() const;
  OpCost cost() const;
};

/// x <- the Newton-Schulz iterate of x as in MuonUpdate, without momentum and scale; in place.
///
///   x  [batch, rows, cols] or [rows, cols], f64 | f32
struct NewtonSchulz {
  static constexpr const char* kName = "newton_schulz";
  TensorView x;
  std::vector<RowBlock> blocks;
  int num_iterations = 5;
  bool bf16_products = false;  ///< as in MuonUpdate

  std::int64_t batch() const { return x.rank() == 3 ? x.dim(0) : 1; }
  std::int64_t rows() const { return x.dim(x.rank() - 2); }
  std::int64_t cols() const { return x.dim(x.rank() - 1); }
  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const MuonUpdate& op);
void launch(CpuContext& context, const NewtonSchulz& op);
void launch(CudaContext& context, const MuonUpdate& op);
void launch(CudaContext& context, const NewtonSchulz& op);

}  // namespace moesaic
