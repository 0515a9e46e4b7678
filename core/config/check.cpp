#include "core/config/check.h"

#include "core/config/check_pieces.h"
#include "core/config/check_topics.h"

namespace moesaic::config {
namespace {

Problem without_position(const Finding& finding) {
  return {"", 0, 0, finding.keys.front(), finding.message};
}

}  // namespace

std::vector<Finding> findings(const Config& config) {
  std::vector<Finding> all;
  add_model_findings(config, all);
  add_training_findings(config, all);
  add_layout_findings(config, all);
  add_offload_findings(config, all);
  add_piece_findings(config, all);
  return all;
}

std::vector<Problem> check(const Config& config) {
  std::vector<Problem> problems;
  for (const Finding& finding : findings(config))
    problems.push_back(without_position(finding));
  return problems;
}

std::vector<Problem> untrainable(const Config& config) {
  std::vector<Problem> problems;
  if (config.model.rope_scaling) {
    problems.push_back({"",
                        0,
                        0,
                        "model.rope_scaling",
                        "context extension by YaRN can be planned but not trained; remove the "
                        "group to train with plain rotation"});
  }
  return problems;
}

}  // namespace moesaic::config
