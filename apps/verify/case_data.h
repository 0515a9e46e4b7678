#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/tensor.h"
#include "core/checkpoint/safetensors.h"

namespace moesaic::verify {

/// A tensor of a case on the host. Integers are doubles too (none is beyond 2^53).
struct CaseTensor {
  Shape shape;
  bool is_floating = true;
  std::vector<double> values;
};

/// How far results of a case that was made at run time may be off (generated_limit()).
struct GeneratedAccuracy {
  std::int64_t longest_sum = 1;  ///< terms of the longest sum on the way to a result
  int roundings = 4;             ///< dependent roundings to the compute type on that way
  /// Parts of names of results that jump where a number changes its sign: kink_limit() holds for them.
  std::vector<std::string> kinks;
};

/// One case: inputs, and the results that they should give. Read from a file, or made at run time; then the results are
/// those of the CPU backend in f64.
struct CaseData {
  std::string name;
  std::string cfg = "{}";  ///< a JSON object of sizes and constants
  std::map<std::string, CaseTensor> tensors;
  bool stored_in_f32 = false;
  std::optional<GeneratedAccuracy> generated;  ///< empty: a golden case
  DType inputs_in = DType::f64;  ///< generated cases: inputs are representable in this type
  /// Generated cases: which kernels (op, path) must run on CUDA in bf16, where ops may take all of theirs.
  std::vector<std::pair<std::string, std::string>> expected_paths;

  bool contains(const std::string& tensor) const { return tensors.contains(tensor); }
  /// Throws InputError naming the case when there is no such tensor.
  const CaseTensor& at(const std::string& tensor) const;
};

/// All tensors of a golden case; throws InputError for a tensor of a type that cases do not have, or without `cfg`.
CaseData load_case(const SafetensorsFile& file);

}  // namespace moesaic::verify
