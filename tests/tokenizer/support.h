#pragma once
#include <fstream>
#include <iterator>
#include <string>

#include "core/base/error.h"
#include "core/tokenizer/unicode.h"

namespace moesaic::tokenizer {

inline std::string test_file(const std::string& name) {
  std::ifstream file(MOESAIC_SOURCE_DIR "/tests/tokenizer/files/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// `text` with its only `from` replaced.
inline std::string with(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  if (at == std::string::npos || text.find(from, at + 1) != std::string::npos)
    throw InternalError("the test wants exactly one '" + from + "'");
  return text.replace(at, from.size(), to);
}

/// What an InputError says; empty without one.
template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Whether this build has PCRE2 and utf8proc; says so where not, so that CTest counts a skip.
bool has_unicode_libraries();

}  // namespace moesaic::tokenizer
