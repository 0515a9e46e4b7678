#pragma once
#include <filesystem>
#include <vector>

#include "apps/report/read_run.h"

namespace moesaic::apps::report {

/// RFC 4180 text of all step lines, every value in full; empty where a step has none.
std::string steps_csv(const RunData& run);
/// step, eval loss.
std::string evals_csv(const RunData& run);
/// step, layer, expert, tokens, load as a multiple of the layer's mean: of the last `experts` record.
std::string experts_csv(const RunData& run);

/// Writes NAME_steps.csv, NAME_evals.csv and NAME_experts.csv of every run into `dir`, which is made. Throws ResourceError.
std::vector<std::filesystem::path> write_csv(const std::vector<RunData>& runs,
                                             const std::filesystem::path& dir);

}  // namespace moesaic::apps::report
