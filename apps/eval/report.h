#pragma once
#include <filesystem>
#include <iosfwd>
#include <string>
#include <vector>

#include "apps/eval/choice_score.h"
#include "apps/eval/scorer.h"

namespace moesaic::apps::eval {

struct NamedDataScore {
  std::string name;
  DataScore score;
};
struct NamedChoiceScore {
  const ChoiceSet* set = nullptr;
  std::vector<double> logp;  ///< of every text
};

/// Everything that an evaluation found. Nothing in it depends on time or on the number of ranks.
struct EvalResult {
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
  bool average = false;
  std::string device;       ///< "cpu", "cuda"
  std::string precision;    ///< of the computation: "f32"
  std::int64_t window = 0;  ///< most tokens that the model reads at once
  std::vector<NamedDataScore> data;
  std::vector<NamedChoiceScore> choices;
};

void print_text(const EvalResult& result, std::ostream& out);
/// One object in one line; numbers with all their digits.
std::string to_json(const EvalResult& result);
/// A line of JSON per question, of all sets one after the other.
std::string details_of(const EvalResult& result);

}  // namespace moesaic::apps::eval
