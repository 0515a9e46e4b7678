#pragma once
// What an accepted JSON text must be, found by another parser than the product's reader.
#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz.h"

namespace moesaic::fuzz {

/// Demands that an accepted text is one JSON value without a zero byte and that no object has a key twice: the tree then has as many
/// members as the parser saw keys.
inline void require_strict_json(std::string_view text) {
  require(text.find('\0') == std::string_view::npos, "JSON holds no zero byte");
  std::size_t keys = 0, members = 0;
  const auto value = nlohmann::json::parse(
      text.begin(), text.end(), [&](int, nlohmann::json::parse_event_t event, nlohmann::json& v) {
        if (event == nlohmann::json::parse_event_t::key) ++keys;
        if (event == nlohmann::json::parse_event_t::object_end) members += v.size();
        return true;
      });
  require(keys == members, "no object has a key twice");
}

}  // namespace moesaic::fuzz
