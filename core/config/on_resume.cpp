#include "core/config/on_resume.h"

#include <fmt/format.h>

#include "core/config/fields.h"
#include "core/config/resume_rules.h"

namespace moesaic::config {
namespace {

// "a[12].b" -> "a[].b"
std::string without_numbers(const std::string& key) {
  std::string text;
  bool inside = false;
  for (const char c : key) {
    if (c == ']') inside = false;
    if (!inside) text += c;
    if (c == '[') inside = true;
  }
  return text;
}

bool covers(std::string_view rule, std::string_view key) {
  if (!rule.ends_with(".*")) return rule == key;
  rule.remove_suffix(1);
  return key.starts_with(rule);
}

}  // namespace

const ResumeRule* resume_rule(const std::string& key) {
  const std::string full = without_numbers(key);
  const ResumeRule* best = nullptr;
  for (const ResumeRule& rule : kResumeRules) {
    if (covers(rule.key, full) && (best == nullptr || rule.key.size() > best->key.size()))
      best = &rule;
  }
  return best;
}

std::string resume_text(const std::string& key) {
  const ResumeRule* rule = resume_rule(key);
  if (rule == nullptr) return "";
  const std::string why = rule->why.empty() ? "" : fmt::format(" ({})", rule->why);
  switch (rule->kind) {
    case OnResume::free:
      return "may change; the numbers stay the same" + why;
    case OnResume::logged:
      return "may change; the run gives other numbers from there on" + why;
    case OnResume::refused:
      return "must not change" + why;
  }
  return "";
}

}  // namespace moesaic::config
