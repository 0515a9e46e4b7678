#pragma once
#include <string>
#include <string_view>

namespace moesaic::data {

/// The text of member `key` of the JSON object in `line`. The line is parsed to its end, 64 levels deep at most. Throws InputError
/// "where: …" (with the column for bad JSON) for anything but an object, a missing member (naming those there are), one that occurs
/// twice or is no string.
std::string text_of_json_line(std::string_view line,
                              const std::string& key,
                              const std::string& where);

}  // namespace moesaic::data
