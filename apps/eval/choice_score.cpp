#include "apps/eval/choice_score.h"

#include <cmath>

#include "core/base/error.h"

namespace moesaic::apps::eval {
namespace {

std::optional<double> standard_error(double share, std::int64_t count) {
  if (count < 2) return std::nullopt;
  return std::sqrt(share * (1 - share) / static_cast<double>(count - 1));
}

}  // namespace

std::size_t chosen(const ChoiceSet& set,
                   const Question& question,
                   std::span<const double> logp,
                   bool per_byte) {
  const auto score = [&](std::size_t i) {
    const std::size_t at = question.first + i;
    return per_byte ? logp[at] / static_cast<double>(set.texts()[at].bytes) : logp[at];
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < question.count; ++i) {
    if (score(i) > score(best)) best = i;
  }
  return best;
}

ChoiceScore score_of_choices(const ChoiceSet& set, std::span<const double> logp) {
  MOESAIC_CHECK(logp.size() == set.texts().size(), "a score for every text");
  ChoiceScore score;
  std::int64_t right = 0, right_norm = 0, answer_tokens = 0;
  double answer_logp = 0;
  for (const Question& question : set.questions()) {
    right += chosen(set, question, logp, false) == question.answer ? 1 : 0;
    right_norm += chosen(set, question, logp, true) == question.answer ? 1 : 0;
    score.chance += 1.0 / static_cast<double>(question.count);
    const std::size_t answer = question.first + question.answer;
    answer_logp += logp[answer];
    answer_tokens += set.texts()[answer].scored();
  }
  score.questions = static_cast<std::int64_t>(set.questions().size());
  const auto n = static_cast<double>(score.questions);
  score.acc = static_cast<double>(right) / n;
  score.acc_norm = static_cast<double>(right_norm) / n;
  score.acc_stderr = standard_error(score.acc, score.questions);
  score.acc_norm_stderr = standard_error(score.acc_norm, score.questions);
  score.chance /= n;
  score.answer_loss = -answer_logp / static_cast<double>(answer_tokens);
  return score;
}

}  // namespace moesaic::apps::eval
