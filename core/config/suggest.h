#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core/config/fields.h"

namespace moesaic::config {

/// What to say about `key`, which is none of `section` (full name `path`, "" = top): the name it
/// has here if it is the spelling of another model family, the section it belongs to, the nearest
/// key, or the keys there are.
std::string unknown_key_message(const Section& section,
                                const std::string& path,
                                const std::string& key);

/// Full keys (lists as `key[]`) whose last part is `name` or that know `name` as another spelling.
std::vector<std::string> keys_named(std::string_view name);

}  // namespace moesaic::config
