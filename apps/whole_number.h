#pragma once
#include <string>

namespace moesaic::apps {

/// A check of an option of the command line (CLI11): empty for a whole number that is at least 0, else what is wrong.
/// CLI11's own check prints its upper bound in 309 digits.
std::string whole_number(const std::string& text);

}  // namespace moesaic::apps
