#include "tests/tokenizer/support.h"

#include <iostream>

namespace moesaic::tokenizer {

bool has_unicode_libraries() {
  if (unicode_libraries() != "none") return true;
  std::cout << "SKIPPED: tokenizers of words: this build has no PCRE2 and utf8proc\n";
  return false;
}

}  // namespace moesaic::tokenizer
