#include "apps/eval/report.h"

#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/data/source_arguments.h"
#include "apps/text_table.h"

namespace moesaic::apps::eval {
namespace {

using nlohmann::ordered_json;

std::string percent(double share, const std::optional<double>& error) {
  const std::string text = fmt::format("{:.2f} %", 100 * share);
  return error ? text + fmt::format(" +- {:.2f}", 100 * *error) : text;
}

std::string line_of(const NamedDataScore& data) {
  const DataScore& score = data.score;
  std::string text = fmt::format("{:<10} loss {:.4f} nats/token | perplexity {:.4g}",
                                 data.name,
                                 score.stats.loss,
                                 score.perplexity());
  if (const auto bits = score.bits_per_byte()) text += fmt::format(" | {:.4f} bits/byte", *bits);
  return text + fmt::format(" | {} tokens", grouped(score.stats.predicted_tokens));
}

std::string line_of(const ChoiceSet& set, const ChoiceScore& score) {
  return fmt::format(
      "{:<10} acc {} | acc_norm {} | chance {:.2f} % | answers {:.4f} nats/token | {} questions",
      set.name(),
      percent(score.acc, score.acc_stderr),
      percent(score.acc_norm, score.acc_norm_stderr),
      100 * score.chance,
      score.answer_loss,
      grouped(score.questions));
}

ordered_json optional_number(const std::optional<double>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

ordered_json json_of(const NamedDataScore& data) {
  const DataScore& score = data.score;
  ordered_json j;
  j["name"] = data.name;
  j["loss"] = score.stats.loss;
  j["perplexity"] = score.perplexity();
  j["bits_per_byte"] = optional_number(score.bits_per_byte());
  j["tokens"] = score.stats.predicted_tokens;
  j["bytes"] = score.bytes ? ordered_json(*score.bytes) : ordered_json(nullptr);
  return j;
}

ordered_json json_of(const NamedChoiceScore& choices) {
  const ChoiceScore score = score_of_choices(*choices.set, choices.logp);
  ordered_json j;
  j["name"] = choices.set->name();
  j["questions"] = score.questions;
  j["acc"] = score.acc;
  j["acc_stderr"] = optional_number(score.acc_stderr);
  j["acc_norm"] = score.acc_norm;
  j["acc_norm_stderr"] = optional_number(score.acc_norm_stderr);
  j["chance"] = score.chance;
  j["answer_loss"] = score.answer_loss;
  j["cut_contexts"] = choices.set->num_cut();
  j["without_context"] = choices.set->num_without_context();
  return j;
}

}  // namespace

void print_text(const EvalResult& result, std::ostream& out) {
  out << fmt::format("{:<10} {} | step {}{} | {} on {}\n",
                     "checkpoint",
                     result.checkpoint.string(),
                     result.step,
                     result.average ? " | moving averages" : "",
                     result.precision,
                     result.device);
  for (const NamedDataScore& data : result.data)
    out << line_of(data) << '\n';
  for (const NamedChoiceScore& choices : result.choices) {
    const ChoiceSet& set = *choices.set;
    out << line_of(set, score_of_choices(set, choices.logp)) << '\n';
    if (set.num_cut() > 0)
      out << fmt::format(
          "{:<10} the context lost its beginning in {} question(s): the model reads {} tokens\n",
          "",
          grouped(set.num_cut()),
          grouped(result.window));
    if (set.num_without_context() > 0)
      out << fmt::format(
          "{:<10} no context in {} question(s): the first token of a choice is given\n",
          "",
          grouped(set.num_without_context()));
  }
  out << std::flush;
}

std::string to_json(const EvalResult& result) {
  ordered_json j;
  j["checkpoint"] = result.checkpoint.string();
  j["step"] = result.step;
  j["average"] = result.average;
  j["device"] = result.device;
  j["precision"] = result.precision;
  j["data"] = ordered_json::array();
  for (const NamedDataScore& data : result.data)
    j["data"].push_back(json_of(data));
  j["choices"] = ordered_json::array();
  for (const NamedChoiceScore& choices : result.choices)
    j["choices"].push_back(json_of(choices));
  // A path need not be UTF-8.
  return j.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

std::string details_of(const EvalResult& result) {
  std::string text;
  for (const NamedChoiceScore& choices : result.choices) {
    const ChoiceSet& set = *choices.set;
    for (const Question& question : set.questions()) {
      ordered_json j;
      j["name"] = set.name();
      j["line"] = question.line;
      j["answer"] = question.answer;
      j["chosen"] = chosen(set, question, choices.logp, false);
      j["chosen_norm"] = chosen(set, question, choices.logp, true);
      for (std::size_t i = question.first; i < question.first + question.count; ++i) {
        j["logp"].push_back(choices.logp[i]);
        j["tokens"].push_back(set.texts()[i].scored());
        j["bytes"].push_back(set.texts()[i].bytes);
      }
      j["cut"] = question.cut;
      text += j.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
    }
  }
  return text;
}

}  // namespace moesaic::apps::eval
