#include "core/base/error.h"

#include <fmt/format.h>

namespace moesaic {

void check_failed(const char* file, int line, const char* condition, const std::string& what) {
  throw InternalError(fmt::format("{}:{}: {} [{}]", file, line, what, condition));
}

}  // namespace moesaic
