#pragma once
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic {

// Updates of the router's selection bias. `skip` (one element, empty = never) leaves the bias as it
// is when it is not zero; StepScalars holds such a flag.

/// histogram[j, clamp(floor((cutoff_t - s_tj - lo) / w), 0, bins - 1)] += 1  for all tokens t and
/// experts j, with lo = min(bias) - 1, w = (max(bias) - min(bias) + 2) / bins.
///
///   histogram [experts, bins] i32, accumulates;  scores [tokens, experts], cutoff [tokens], bias
///   [experts] statistics type, as RouterForward used and wrote them.   Source: SPEC 5.3; Kimi-K3
///   report, appendix D.
struct BalanceHistogram {
  static constexpr const char* kName = "balance_histogram";
  TensorView histogram;
  ConstTensorView scores;
  ConstTensorView cutoff;
  ConstTensorView bias;

  void check() const;
  OpCost cost() const;
};

/// bias_j = lo + (m + clip((q - c) / h, 0, 1)) w, then the mean over j is subtracted;  q = tokens
/// top_k / experts, m = first bin with cumulative count >= ceil(q), c = count before it, h = count
/// in it; lo, w from the old bias.
///
///   bias [experts] statistics type, in place;  histogram [experts, bins] i32, of the whole step
///   tokens  one element (f64 | f32 | i64 | i32): tokens of the whole step. Zero tokens leave the
///   bias as it is.
struct BalanceBiasFromHistogram {
  static constexpr const char* kName = "balance_bias_from_histogram";
  TensorView bias;
  ConstTensorView histogram;
  ConstTensorView tokens;
  ConstTensorView skip;
  std::int64_t top_k = 0;

  void check() const;
  OpCost cost() const;
};

/// margins[t, j] = s_tj - cutoff_t: what the exact rule keeps of a micro-batch.
///
///   margins, scores [tokens, experts];  cutoff [tokens]   statistics type; margins may alias
///   scores
struct BalanceMargins {
  static constexpr const char* kName = "balance_margins";
  TensorView margins;
  ConstTensorView scores;
  ConstTensorView cutoff;

  void check() const;
  OpCost cost() const;
};

/// bias_j = -(the (floor(q) + 1)-th largest margin of expert j), then the mean is subtracted;  q =
/// tokens top_k / experts.
///
///   bias [experts] overwritten;  margins [tokens, experts] of the whole step, one statistics type
/// Source: SPEC 5.3, exact form.
struct BalanceBiasExact {
  static constexpr const char* kName = "balance_bias_exact";
  TensorView bias;
  ConstTensorView margins;
  ConstTensorView skip;
  std::int64_t top_k = 0;

  void check() const;
  OpCost cost() const;
};

/// bias_j += gamma sign(mean(counts) - counts_j), sign(0) = 0; the comparison is made in integers.
///
///   bias [experts] statistics type, in place;  counts [experts] i64 | i32 of the whole step.
///   Source: SPEC 5.2.
struct BalanceBiasSign {
  static constexpr const char* kName = "balance_bias_sign";
  TensorView bias;
  ConstTensorView counts;
  ConstTensorView skip;
  double gamma = 1e-3;

  void check() const;
  OpCost cost() const;
};

/// total[j] += counts[j].   total [experts] i64;  counts [experts] i32 | i64.
struct AccumulateCounts {
  static constexpr const char* kName = "accumulate_counts";
  TensorView total;
  ConstTensorView counts;

  void check() const;
  OpCost cost() const;
};

/// frequency_j = counts_j / sum(counts), or 1 / experts when all counts are zero: the constant of
/// the global loss.
///
///   frequency [experts] statistics type, overwritten;  counts [experts] i64 | i32
struct BalanceFrequency {
  static constexpr const char* kName = "balance_frequency";
  TensorView frequency;
  ConstTensorView counts;
  ConstTensorView skip;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const BalanceHistogram& op);
void launch(CpuContext& context, const BalanceBiasFromHistogram& op);
void launch(CpuContext& context, const BalanceMargins& op);
void launch(CpuContext& context, const BalanceBiasExact& op);
void launch(CpuContext& context, const BalanceBiasSign& op);
void launch(CpuContext& context, const AccumulateCounts& op);
void launch(CpuContext& context, const BalanceFrequency& op);
void launch(CudaContext& context, const BalanceHistogram& op);
void launch(CudaContext& context, const BalanceBiasFromHistogram& op);
void launch(CudaContext& context, const BalanceMargins& op);
void launch(CudaContext& context, const BalanceBiasExact& op);
void launch(CudaContext& context, const BalanceBiasSign& op);
void launch(CudaContext& context, const AccumulateCounts& op);
void launch(CudaContext& context, const BalanceFrequency& op);

}  // namespace moesaic
