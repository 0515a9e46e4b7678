#pragma once
#include "apps/verify/case_run.h"
#include "core/model/options.h"

namespace moesaic::verify {

// Sizes of a golden case's layers as modules take them; `at` is where they lie in cfg ("" or
// "moe.").
GluActivation glu_activation(const CaseRun& run, const std::string& at);
KdaOptions kda_options(const CaseRun& run, const std::string& at, std::int64_t hidden, double eps);
MlaOptions mla_options(const CaseRun& run, const std::string& at, std::int64_t hidden);
IndexerOptions indexer_options(const CaseRun& run, const std::string& at);
MoeOptions moe_options(const CaseRun& run, const std::string& at, std::int64_t hidden, double eps);

}  // namespace moesaic::verify
