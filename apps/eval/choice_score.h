#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "apps/eval/choice_set.h"

namespace moesaic::apps::eval {

/// What a model made of a set of questions. A choice's score is the sum of log p of its tokens, nats; the choice with the
/// highest one is chosen, the first of equals.
struct ChoiceScore {
  std::int64_t questions = 0;
  double acc = 0;       ///< share of questions whose answer was chosen
  double acc_norm = 0;  ///< the same by score per byte of the choice
  /// Standard errors of the two, sqrt(a (1 - a) / (n - 1)); nothing for one question.
  std::optional<double> acc_stderr, acc_norm_stderr;
  double chance = 0;       ///< of somebody who guesses: the mean of 1 / number of choices
  double answer_loss = 0;  ///< nats per token of the right choices
};

/// `logp`: the score of every text of the set.
ChoiceScore score_of_choices(const ChoiceSet& set, std::span<const double> logp);

/// The choice with the highest score of a question, from 0; `per_byte`: divided by the choice's bytes.
std::size_t chosen(const ChoiceSet& set,
                   const Question& question,
                   std::span<const double> logp,
                   bool per_byte);

}  // namespace moesaic::apps::eval
