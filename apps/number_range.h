#pragma once
#include <functional>
#include <string>

namespace moesaic::apps {

/// Checks the text of an option: a number from `least` to `most`; unlike CLI::Range it does not let NaN through.
std::function<std::string(const std::string&)> number_in(double least, double most);

}  // namespace moesaic::apps
