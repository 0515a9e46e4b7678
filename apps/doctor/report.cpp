#include "apps/doctor/report.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace moesaic::apps::doctor {
namespace {

using Json = nlohmann::ordered_json;

const char* name_of(Health health) {
  switch (health) {
    case Health::ok:
      return "ok";
    case Health::warn:
      return "warn";
    case Health::fail:
      break;
  }
  return "fail";
}

bool equal(const Finding& a, const Finding& b) {
  return a.health == b.health && a.what == b.what && a.found == b.found && a.advice == b.advice;
}

// Texts come from the system (names, paths), in whatever encoding.
std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

std::string indented(std::string text) {
  const std::string indent = "\n" + std::string(21, ' ');
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += indent.size())
    text.replace(at, 1, indent);
  return text;
}

}  // namespace

std::vector<MergedFinding> merge(const std::vector<RankFindings>& ranks) {
  std::vector<MergedFinding> merged;
  std::set<std::string> all;
  for (const RankFindings& rank : ranks) {
    all.insert(rank.host);
    for (const Finding& finding : rank.findings) {
      auto same = std::find_if(merged.begin(), merged.end(), [&](const MergedFinding& m) {
        return equal(m.finding, finding);
      });
      if (same == merged.end()) {
        // Behind the last of this name.
        const auto named =
            std::find_if(merged.rbegin(), merged.rend(), [&](const MergedFinding& m) {
              return m.finding.what == finding.what;
            });
        same = merged.insert(named == merged.rend() ? merged.end() : named.base(), {finding, {}});
      }
      if (std::find(same->hosts.begin(), same->hosts.end(), rank.host) == same->hosts.end())
        same->hosts.push_back(rank.host);
    }
  }
  for (MergedFinding& m : merged) {
    if (m.hosts.size() == all.size()) m.hosts.clear();
  }
  return merged;
}

Health worst(const std::vector<MergedFinding>& findings) {
  Health health = Health::ok;
  for (const MergedFinding& m : findings)
    health = std::max(health, m.finding.health);
  return health;
}

std::string text_of(const std::vector<MergedFinding>& findings) {
  std::string text;
  int warnings = 0, failures = 0;
  for (const MergedFinding& m : findings) {
    const Finding& f = m.finding;
    warnings += f.health == Health::warn ? 1 : 0;
    failures += f.health == Health::fail ? 1 : 0;
    text += fmt::format("{:<5} {:<14} {}", name_of(f.health), f.what, f.found);
    if (!m.hosts.empty()) text += fmt::format("  [{}]", fmt::join(m.hosts, ", "));
    text += '\n';
    if (!f.advice.empty()) text += fmt::format("{:<20} -> {}\n", "", indented(f.advice));
  }
  text +=
      fmt::format("{} checked: {} failed, {} warning(s)\n", findings.size(), failures, warnings);
  return text;
}

std::string json_of(const std::vector<MergedFinding>& findings) {
  Json list = Json::array();
  for (const MergedFinding& m : findings) {
    list.push_back({{"health", name_of(m.finding.health)},
                    {"what", m.finding.what},
                    {"found", m.finding.found},
                    {"advice", m.finding.advice},
                    {"hosts", m.hosts}});
  }
  return dump({{"ok", worst(findings) != Health::fail}, {"findings", list}}, 2) + "\n";
}

std::string packed(const RankFindings& rank) {
  Json list = Json::array();
  for (const Finding& f : rank.findings)
    list.push_back({static_cast<int>(f.health), f.what, f.found, f.advice});
  return dump({{"host", rank.host}, {"findings", list}}, -1);
}

RankFindings unpacked(const std::string& text) {
  const Json json = Json::parse(text);
  RankFindings rank{json.at("host").get<std::string>(), {}};
  for (const Json& f : json.at("findings"))
    rank.findings.push_back({static_cast<Health>(f.at(0).get<int>()),
                             f.at(1).get<std::string>(),
                             f.at(2).get<std::string>(),
                             f.at(3).get<std::string>()});
  return rank;
}

}  // namespace moesaic::apps::doctor
