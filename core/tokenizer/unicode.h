#pragma once
// What is asked of PCRE2 and utf8proc. A build without them takes unicode_absent.cpp, where all of this throws.
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace moesaic::tokenizer {

/// Throws UsageError in a build without the libraries.
void require_unicode_libraries();
/// "PCRE2 10.42 (Unicode 14.0.0), utf8proc 2.8.0 (Unicode 15.0.0)"
std::string unicode_libraries();

/// A compiled pattern; immutable, usable from several threads.
class Regex {
 public:
  /// `pattern` in PCRE2's syntax (regex_syntax.h makes it). `where` names it in messages. Throws InputError for a pattern that does
  /// not compile, or that can match the empty text.
  Regex(const std::string& pattern, std::string where);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

 private:
  friend class RegexMatcher;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Match {
  std::size_t begin = 0, end = 0;
};

/// Searches with one pattern; holds the working memory of one thread. Must not outlive its Regex.
class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);
  RegexMatcher(RegexMatcher&&) noexcept;
  ~RegexMatcher();
  /// The leftmost match at or after `from`; look-behind sees `text` from its start. `text` is valid UTF-8, `from` the start of a
  /// character. Throws InputError when the pattern backtracks beyond all measure.
  bool find(std::string_view text, std::size_t from, Match& match);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Normalisation form C of valid UTF-8.
std::string nfc(std::string_view text);

}  // namespace moesaic::tokenizer
