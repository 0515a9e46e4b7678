#pragma once
#include <string>
#include <string_view>

namespace moesaic::config {

/// What a changed key means to a run that continues from a checkpoint.
enum class OnResume {
  free,    ///< the numbers stay the same (apart from what the key itself is about)
  logged,  ///< allowed; the run gives other numbers from there on, and says so
  refused  ///< the state or the order of the data would not fit
};

struct ResumeRule {
  std::string_view key;  ///< a full key, items of lists as `key[]`; `section.*` for all keys below
  OnResume kind;
  std::string_view why;  ///< completes "…: "; empty where the kind says all
};

/// The rule of a full key ("train.phases[1].until"), the longest that fits, or null. A test sees to it that every key
/// has one.
const ResumeRule* resume_rule(const std::string& key);

/// "may change: …" in words, for `explain`.
std::string resume_text(const std::string& key);

}  // namespace moesaic::config
