#pragma once
#include <cstdint>
#include <string>

#include "core/base/error.h"

namespace moesaic {

/// A run needs more memory than a rank of it may take. Ranks may need different amounts (the stages of a pipeline): who has the
/// errors of several tells the user the largest need.
class MemoryShortage : public ResourceError {
 public:
  enum class Where : std::uint8_t { device, host };
  /// `needed`: bytes that must be there, of what `where` says; the text says the rest.
  MemoryShortage(Where where, std::uint64_t needed, const std::string& what)
      : ResourceError(what), where_(where), needed_(needed) {}
  Where where() const noexcept { return where_; }
  std::uint64_t needed() const noexcept { return needed_; }

 private:
  Where where_;
  std::uint64_t needed_;
};

}  // namespace moesaic
