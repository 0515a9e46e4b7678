// Which runner a case's name chooses.
#include <cstring>
#include <vector>

#include "apps/verify/case_run.h"

namespace moesaic::verify {
namespace {
std::vector<CaseFamily>& families() {
  static std::vector<CaseFamily> list;
  return list;
}
}  // namespace

RegisterFamily::RegisterFamily(CaseFamily family) {
  families().push_back(family);
}

const CaseFamily* find_family(const std::string& case_name) {
  const CaseFamily* best = nullptr;
  for (const CaseFamily& family : families()) {
    const std::string prefix = family.prefix;
    if (case_name.starts_with(prefix) &&
        (best == nullptr || prefix.size() > std::strlen(best->prefix)))
      best = &family;
  }
  return best;
}

}  // namespace moesaic::verify
