#pragma once
#include <map>
#include <string>
#include <vector>

#include "apps/verify/case_data.h"
#include "core/base/dtype.h"

namespace moesaic::verify {

/// True for the stored results of a case: out., aux., grad….,  traj., final.
bool is_result(const std::string& name);
/// What a result's error may be measured against besides its own size: the text before the first dot.
std::string kind_of(const std::string& name);

/// A stored integer tensor; throws InputError for a floating one.
std::vector<std::int64_t> read_ints(const CaseData& data, const std::string& name);

/// The largest L2 norm among the stored results of each kind.
std::map<std::string, double> largest_norms(const CaseData& data);

/// `value` as an input of a generated case: rounded to `dtype`, or, where it stays in f32 next to bf16, to f32.
double round_input(DType dtype, bool stays_f32, double value);

/// How far a result is from the stored one.
struct Difference {
  double relative =
      0;  ///< ||got - want|| / max(||want||, 1e-6 largest norm of the kind); infinite if not finite
  double absolute = 0;  ///< largest |got - want|
  bool stored_zero =
      false;  ///< all stored elements are zero: judged by zero_floor() and not by `relative`
};
Difference difference(const std::vector<double>& got,
                      const std::vector<double>& want,
                      double largest_norm_of_kind);

/// The row (first axis of `rows` entries) that is farthest off, relative to the larger of its own size and the root mean
/// square size of all rows: one wrong row, at a tail, say, hardly shows in the error of the whole.
struct RowDifference {
  std::int64_t row = 0;
  double relative = 0;
};
RowDifference worst_row(const std::vector<double>& got,
                        const std::vector<double>& want,
                        std::int64_t rows);
/// How many times the limit of the whole a row's error may be: rows of few and of small elements vary.
constexpr double kRowFactor = 6;

/// Largest relative error accepted. f64: 1e-9, or 2e-7 where results are stored in float32. Else 32 u sqrt(length) for
/// f32 (u = 2^-24) and 2 u sqrt(length) for bf16 (u = 2^-8): errors of independent roundings grow with the root of
/// the length of the sums; the constants leave room for a chain of a few dependent ops.
double relative_limit(DType compute, bool stored_in_f32, double length);
/// Largest absolute error accepted for a tensor stored as all zeros.
double zero_floor(DType compute);
/// The length that relative_limit() uses: the largest extent of any stored tensor, at least 16.
double longest_extent(const CaseData& data);
/// The same for cases that were made at run time, whose extents say nothing about sums (a vocabulary of 163,840 words
/// would excuse anything). f32: relative_limit() for the longest sum. bf16: sums are formed in f32, so only roundings
/// of operands and results count: 2 u sqrt(roundings), u = 2^-8.
double generated_limit(DType compute, const GeneratedAccuracy& accuracy);
/// A result that holds terms which are there or not by the sign of a number (the derivative of a relu): rounding turns
/// the sign of a share of them that grows with u, so the relative error is about the root of that share. f32: 16 sqrt(u),
/// a single turned sign among some 1e5; bf16: 4 sqrt(u).
double kink_limit(DType compute);
/// True for the results that it holds for (GeneratedAccuracy::kinks).
bool has_kink(const CaseData& data, const std::string& result);
/// The limit for a result of `data`, whichever kind it is.
double limit_of(DType compute, const CaseData& data, const std::string& result);

}  // namespace moesaic::verify
