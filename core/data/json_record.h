#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace moesaic::data {

inline constexpr std::size_t kMaxJsonRecordBytes = std::size_t{64} << 20;
inline constexpr int kMaxJsonRecordDepth = 16;

/// The JSON object of one line of a JSONL file. Throws InputError "where: …" for what is not JSON (UTF-8) or no object, for a
/// key given twice in one object, and for more than 64 MiB or 16 levels.
nlohmann::json parse_json_record(std::string_view line, const std::string& where);

/// The keys of an object, the first of them and shortened, for messages: "prompt, text"; "none".
std::string keys_for_message(const nlohmann::json& object);

}  // namespace moesaic::data
