#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Cross-entropy over a vocabulary whose logits lie in equal blocks of words, one per rank: block b has the words
/// [b * words, (b + 1) * words). Each rank forms what the softmax needs of its own block, all exchange these two numbers a
/// row, and each goes on with its own logits:
///
///   sums[r, 0] = m_r = max_v logits[r, v],   sums[r, 1] = sum_v exp(logits[r, v] - m_r)
///
///   logits  [rows, words]  f64 | f32 | bf16
///   sums    [rows, 2]      acc_t; overwritten. A row of nothing but -infinity has (-infinity, 0).
struct VocabBlockSums {
  static constexpr const char* kName = "vocab_block_sums";
  TensorView sums{};
  ConstTensorView logits{};

  void check() const;
  OpCost cost() const;
};

/// CrossEntropy (vocab_loss.h) from one block of words and the sums of all blocks. With lse = M + log sum_b s_b exp(m_b - M),
/// M = max_b m_b, added in the order of blocks:
///
///   loss_sum += sum over the rows t whose target is in this block of w_t (lse_t - logits[t, target_t])
///   z_sum    += sum over the same rows of w_t lse_t^2
///   dlogits   = this block's columns of CrossEntropy's, of all rows
///   logp      = log p of the target where it is in this block, else 0
///
/// so that losses and logp of all blocks add up to those of the whole.
///
///   logits   [rows, words]         f64 | f32 | bf16
///   sums     [blocks, rows, 2]     acc_t, by VocabBlockSums
///   targets  [rows] i32            of the whole vocabulary, or kIgnoredTarget
///   weight, divisor, dlogits, loss_sum, z_sum, logp   as in CrossEntropy
///
/// The derivation is the identity of log-sum-exp over a partition; everything in acc_t, row sums in row order.
struct VocabBlockCrossEntropy {
  static constexpr const char* kName = "vocab_block_cross_entropy";
  TensorView loss_sum{};
  TensorView z_sum{};
  TensorView logp{};
  TensorView dlogits{};
  ConstTensorView logits{};
  ConstTensorView sums{};
  ConstTensorView targets{};
  ConstTensorView weight{};
  ConstTensorView divisor{};
  std::int64_t block = 0;
  double z_coef = 0.0;
  double grad_scale = 1.0;

  void check() const;
  OpCost cost() const;
  std::int64_t blocks() const { return sums.dim(0); }
  std::int64_t vocabulary() const { return blocks() * logits.dim(1); }
};

void launch(CpuContext& context, const VocabBlockSums& op);
void launch(CpuContext& context, const VocabBlockCrossEntropy& op);
void launch(CudaContext& context, const VocabBlockSums& op);
void launch(CudaContext& context, const VocabBlockCrossEntropy& op);

}  // namespace moesaic
