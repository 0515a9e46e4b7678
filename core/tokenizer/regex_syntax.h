#pragma once
#include <string>
#include <string_view>

namespace moesaic::tokenizer {

/// Whose regular expressions a pattern was written for: Oniguruma (tokenizer.json), or Rust's regex with look-around
/// (tiktoken). They and PCRE2 agree on most of what tokenizers use, and differ silently in the rest.
enum class RegexDialect { oniguruma, rust };

/// The same pattern for PCRE2 (UTF, UCP). Rewritten: \s and \S to the property White_Space, script names to "sc:" (PCRE2
/// takes script extensions), \uHHHH, and set intersections [A&&[^B]] of general categories to one negated set. Anything
/// whose meaning differs between the engines, or that is not in use by tokenizers, is an InputError that names `where`,
/// the byte and the construct.
std::string to_pcre2(std::string_view pattern, RegexDialect dialect, const std::string& where);

/// A pattern that matches exactly this text.
std::string quote_for_pcre2(std::string_view text);

}  // namespace moesaic::tokenizer
