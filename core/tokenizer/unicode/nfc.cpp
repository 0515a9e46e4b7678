#define PCRE2_CODE_UNIT_WIDTH 8
#include <array>
#include <cstdlib>
#include <memory>

#include <fmt/format.h>
#include <pcre2.h>
#include <utf8proc.h>

#include "core/base/error.h"
#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {

std::string nfc(std::string_view text) {
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()),
                   &result,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (size < 0) throw InternalError(fmt::format("utf8proc_map: {}", utf8proc_errmsg(size)));
  return {reinterpret_cast<const char*>(result), static_cast<std::size_t>(size)};
}

std::string unicode_libraries() {
  std::array<char, 64> pcre2{}, unicode{};
  pcre2_config(PCRE2_CONFIG_VERSION, pcre2.data());
  pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, unicode.data());
  const std::string version(pcre2.data());
  return fmt::format("PCRE2 {} (Unicode {}), utf8proc {} (Unicode {})",
                     version.substr(0, version.find(' ')),
                     unicode.data(),
                     utf8proc_version(),
                     utf8proc_unicode_version());
}

}  // namespace moesaic::tokenizer
