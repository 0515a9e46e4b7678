#include "core/data/token_meta.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::data {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMostBytes = std::size_t{64} << 10;
constexpr int kMostLevels = 4;

class MetaReader {
 public:
  MetaReader(std::string_view text, const std::string& name) : name_(name) {
    if (text.size() > kMostBytes)
      refuse(fmt::format("{} bytes, allowed at most {}", text.size(), kMostBytes));
    if (const auto at = zero_byte_in(text)) refuse(fmt::format("a zero byte at offset {}", *at));
    const auto shallow = [&](int depth, ordered_json::parse_event_t, ordered_json&) {
      if (depth > kMostLevels) refuse("objects are nested too deeply");
      return true;
    };
    try {
      json_ = ordered_json::parse(text.begin(), text.end(), shallow);
    } catch (const ordered_json::exception& e) {
      refuse(e.what());
    }
    if (!json_.is_object()) refuse("not a JSON object");
  }
  std::string text(const ordered_json& from, const char* key) const {
    const auto it = from.find(key);
    if (it == from.end()) return "";
    if (!it->is_string()) refuse(fmt::format("{} is not a text", key));
    return it->get<std::string>();
  }
  std::int64_t count(const ordered_json& from, const char* key, std::int64_t most) const {
    const auto it = from.find(key);
    if (it == from.end()) refuse(fmt::format("{} is missing", key));
    if (!it->is_number_integer() ||
        (it->is_number_unsigned() && it->get<std::uint64_t>() > INT64_MAX))
      refuse(fmt::format("{} is not an integer", key));
    const auto value = it->get<std::int64_t>();
    if (value < 0 || value > most)
      refuse(fmt::format("{} is {}, allowed 0 to {}", key, value, most));
    return value;
  }
  const ordered_json& object(const char* key) const {
    const auto it = json_.find(key);
    if (it == json_.end() || !it->is_object()) refuse(fmt::format("{} is not an object", key));
    return *it;
  }
  const ordered_json& json() const { return json_; }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(
        fmt::format("{}: not a description of a token file: {}; remove it or write the data anew",
                    name_,
                    what));
  }
  std::string name_;
  ordered_json json_;
};

}  // namespace

TokenMeta parse_token_meta(std::string_view text, const std::string& name) {
  const MetaReader reader(text, name);
  const auto& json = reader.json();
  TokenMeta m;
  m.tokenizer = reader.text(json, "tokenizer");
  m.tokenizer_hash = reader.text(json, "tokenizer_hash");
  m.vocab_size = reader.count(json, "vocab_size", INT32_MAX);
  if (json.contains("end_of_text") && !json["end_of_text"].is_null())
    m.end_of_text = reader.count(json, "end_of_text", INT32_MAX);
  m.documents = reader.count(json, "documents", INT64_MAX);
  m.tokens = reader.count(json, "tokens", INT64_MAX);
  const auto file = [&](const char* key, std::uint64_t& bytes, std::uint32_t& crc) {
    const auto& entry = reader.object(key);
    bytes = static_cast<std::uint64_t>(reader.count(entry, "bytes", INT64_MAX));
    crc = static_cast<std::uint32_t>(reader.count(entry, "crc32c", UINT32_MAX));
  };
  file("bin", m.bin_bytes, m.bin_crc32c);
  file("idx", m.idx_bytes, m.idx_crc32c);
  return m;
}

std::string to_json(const TokenMeta& m) {
  ordered_json json = {{"tokenizer", m.tokenizer},
                       {"tokenizer_hash", m.tokenizer_hash},
                       {"vocab_size", m.vocab_size},
                       {"end_of_text", nullptr},
                       {"documents", m.documents},
                       {"tokens", m.tokens},
                       {"bin", {{"bytes", m.bin_bytes}, {"crc32c", m.bin_crc32c}}},
                       {"idx", {{"bytes", m.idx_bytes}, {"crc32c", m.idx_crc32c}}}};
  if (m.end_of_text) json["end_of_text"] = *m.end_of_text;
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace moesaic::data
