// A build without PCRE2 or utf8proc: only the byte-level tokenizer works.
#include "core/base/error.h"
#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {

struct Regex::Impl {};
struct RegexMatcher::Impl {};

void require_unicode_libraries() {
  throw UsageError(
      "this build of moesaic has the byte-level tokenizer only: PCRE2 and utf8proc were not found "
      "when it was configured. Install libpcre2-dev and libutf8proc-dev "
      "(scripts/install_packages.sh) and build again, or use --tokenizer bytes");
}
std::string unicode_libraries() {
  return "none";
}

Regex::Regex(const std::string&, std::string) {
  require_unicode_libraries();
}
Regex::~Regex() = default;

RegexMatcher::RegexMatcher(const Regex&) {
  require_unicode_libraries();
}
RegexMatcher::RegexMatcher(RegexMatcher&&) noexcept = default;
RegexMatcher::~RegexMatcher() = default;
bool RegexMatcher::find(std::string_view, std::size_t, Match&) {
  require_unicode_libraries();
  return false;
}

std::string nfc(std::string_view) {
  require_unicode_libraries();
  return {};
}

}  // namespace moesaic::tokenizer
