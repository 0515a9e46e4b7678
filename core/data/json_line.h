#pragma once
#include <string>
#include <string_view>

namespace moesaic::data {

/// The text of member `key` of the JSON object in `line`. The line is read to its end, 64 levels deep at most. Throws InputError
/// "where:column: …" for what read_json() refuses (a key given twice, also of another member), "where: …" for anything but an
/// object, a missing member (naming those there are), or one that is no string.
std::string text_of_json_line(std::string_view line,
                              const std::string& key,
                              const std::string& where);

}  // namespace moesaic::data
