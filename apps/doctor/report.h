#pragma once
#include <string>
#include <vector>

#include "apps/doctor/judge.h"

namespace moesaic::apps::doctor {

/// What one rank found, on one machine.
struct RankFindings {
  std::string host;
  Findings findings;
};

/// A finding and the machines that it is about; empty: all of them.
struct MergedFinding {
  Finding finding;
  std::vector<std::string> hosts;
};

/// Equal findings of several ranks become one. In the order of the first rank that has them; findings of one name stay
/// together.
std::vector<MergedFinding> merge(const std::vector<RankFindings>& ranks);
Health worst(const std::vector<MergedFinding>& findings);

/// A table: health, what, found, and below it what to do.
std::string text_of(const std::vector<MergedFinding>& findings);
/// {"ok": false, "findings": [{"health", "what", "found", "advice", "hosts"}]}
std::string json_of(const std::vector<MergedFinding>& findings);

// For the exchange between ranks.
std::string packed(const RankFindings& findings);
RankFindings unpacked(const std::string& text);

}  // namespace moesaic::apps::doctor
