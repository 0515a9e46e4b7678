#pragma once
#include <functional>
#include <string>
#include <vector>

#include "apps/verify/case_data.h"

namespace moesaic::verify {

/// The inputs of a case that is made at run time. Values depend on (name of the case, name of the tensor, index) alone,
/// but for their last rounding, to the type in which the case will be judged: both sides then start from equal numbers.
class CaseBuilder {
 public:
  CaseBuilder(const std::string& name, DType inputs_in);

  /// A JSON object of sizes and constants.
  void cfg(const std::string& json) { data_.cfg = json; }
  /// mean + scale times standard normal numbers.
  void normal(const std::string& tensor, Shape shape, double scale = 1.0, double mean = 0.0);
  /// Uniform in [low, high).
  void uniform(const std::string& tensor, Shape shape, double low, double high);
  /// `f` of index and the standard normal number that belongs to it. `stays_f32`: rounded to f32 where the case's inputs
  /// are in bf16.
  void fill(const std::string& tensor,
            Shape shape,
            const std::function<double(std::int64_t, double)>& f,
            bool stays_f32 = false);
  void ints(const std::string& tensor, Shape shape, const std::vector<std::int64_t>& values);
  /// Integers in [0, bound), drawn.
  void random_ints(const std::string& tensor, Shape shape, std::int64_t bound);
  void accuracy(std::int64_t longest_sum, int roundings, std::vector<std::string> kinks = {}) {
    data_.generated = GeneratedAccuracy{longest_sum, roundings, std::move(kinks)};
  }
  /// A kernel that must run on CUDA in bf16.
  void expect_path(const std::string& op, const std::string& path) {
    data_.expected_paths.emplace_back(op, path);
  }
  CaseData take() { return std::move(data_); }

 private:
  std::uint64_t key(const std::string& tensor) const;
  CaseData data_;
};

/// A case to be made, and how.
struct LargeCase {
  std::string name;  ///< its beginning chooses the runner, as with golden cases
  std::function<void(CaseBuilder&)> make;
};
using LargeCases = std::vector<LargeCase>;

// One function per family; large_cases() calls them all.
void add_kda_cases(LargeCases& cases);
void add_attention_cases(LargeCases& cases);
void add_indexer_cases(LargeCases& cases);
void add_grouped_cases(LargeCases& cases);
void add_routing_cases(LargeCases& cases);
void add_row_cases(LargeCases& cases);
void add_vocabulary_cases(LargeCases& cases);
void add_muon_cases(LargeCases& cases);
void add_layer_cases(LargeCases& cases);
LargeCases large_cases();

}  // namespace moesaic::verify
