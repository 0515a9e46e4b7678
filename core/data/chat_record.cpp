#include "core/data/chat_record.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::data {
namespace {

using nlohmann::json;

class RecordReader {
 public:
  RecordReader(std::string_view line, const std::string& where) : where_(where) {
    if (line.size() > kMaxChatRecordBytes)
      refuse(fmt::format("a record of {} bytes, allowed {}", line.size(), kMaxChatRecordBytes));
    if (const auto at = zero_byte_in(line))
      refuse(fmt::format("not JSON: a zero byte behind {} bytes of the line", *at));
    try {
      record_ = json::parse(
          line.begin(), line.end(), [this](int depth, json::parse_event_t event, json& value) {
            return check(depth, event, value);
          });
    } catch (const json::exception& e) {
      refuse(fmt::format("not JSON: {}", e.what()));
    }
    if (!record_.is_object()) refuse("not a JSON object");
  }

  std::vector<ChatPiece> pieces() const {
    const bool chat = record_.contains("messages"), pair = record_.contains("prompt");
    if (chat == pair) {
      std::vector<std::string> keys;
      for (const auto& [key, value] : record_.items())
        keys.push_back(key.size() > 30 ? key.substr(0, 30) + "…" : key);
      if (keys.size() > 8) keys.resize(8);
      refuse(fmt::format(
          "a record needs either \"messages\" or \"prompt\" and \"completion\"; found the keys: "
          "{}{}",
          fmt::join(keys, ", "),
          record_.contains("text") ? "; plain text is prepared with 'moesaic data tokenize'" : ""));
    }
    return chat ? messages() : completion();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }

  bool check(int depth, json::parse_event_t event, const json& value) {
    if (depth > kMaxChatRecordDepth)
      refuse(fmt::format("nested deeper than {} levels", kMaxChatRecordDepth));
    if (event == json::parse_event_t::object_start) keys_[depth + 1].clear();
    if (event == json::parse_event_t::key && !keys_[depth].insert(value.get<std::string>()).second)
      refuse(fmt::format("the key \"{}\" is given twice", value.get<std::string>()));
    return true;
  }

  std::string text_of(const json& object, const char* key, const std::string& what) const {
    const auto it = object.find(key);
    if (it == object.end()) refuse(fmt::format("{} has no \"{}\"", what, key));
    if (!it->is_string()) {
      refuse(fmt::format("\"{}\" of {} is {}, allowed: a text{}",
                         key,
                         what,
                         it->type_name(),
                         it->is_array() ? " (parts such as images are not supported)" : ""));
    }
    return it->get<std::string>();
  }

  std::vector<ChatPiece> messages() const {
    const json& list = record_["messages"];
    if (!list.is_array())
      refuse(fmt::format("\"messages\" is {}, allowed: a list", list.type_name()));
    std::vector<ChatPiece> pieces;
    bool has_target = false;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string what = fmt::format("message {}", i);
      if (!list[i].is_object())
        refuse(fmt::format("{} is {}, allowed: an object", what, list[i].type_name()));
      const std::string role = text_of(list[i], "role", what);
      const bool plain =
          !role.empty() && role.size() <= 64 && std::all_of(role.begin(), role.end(), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                   c == '_' || c == '-';
          });
      if (!plain) refuse(fmt::format("the role of {} is \"{:.64}\", allowed: a word", what, role));
      const bool target = role == "assistant";
      has_target = has_target || target;
      pieces.push_back({fmt::format("{}<|im_start|>{}\n", i > 0 ? "\n" : "", role), false, true});
      pieces.push_back({text_of(list[i], "content", what), target, false});
      pieces.push_back({"<|im_end|>", target, true});
    }
    if (!has_target) refuse("no message of role \"assistant\": there is nothing to learn");
    return pieces;
  }

  std::vector<ChatPiece> completion() const {
    std::vector<ChatPiece> pieces;
    pieces.push_back({text_of(record_, "prompt", "the record"), false, false});
    pieces.push_back({text_of(record_, "completion", "the record"), true, false});
    if (pieces[1].text.empty()) refuse("an empty \"completion\": there is nothing to learn");
    return pieces;
  }

  std::string where_;
  std::map<int, std::set<std::string>> keys_;  // of the object that is open at each depth
  json record_;
};

}  // namespace

std::vector<ChatPiece> parse_chat_record(std::string_view line, const std::string& where) {
  return RecordReader(line, where).pieces();
}

}  // namespace moesaic::data
