#include "apps/path_log.h"

namespace moesaic::apps {
namespace {
void append(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}
}  // namespace

void PathLog::add(const PathLog& other) {
  for (const auto& [what, times] : other.counts_)
    counts_[what] += times;
}

std::string PathLog::text() const {
  std::string list;
  for (const auto& [what, times] : counts_)
    append(list, what.first + " " + what.second);
  return list;
}

std::string PathLog::of(const std::string& op) const {
  std::string list;
  for (const auto& [what, times] : counts_) {
    if (what.first == op) append(list, what.second);
  }
  return list;
}

}  // namespace moesaic::apps
