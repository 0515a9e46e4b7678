#include "core/data/chat_record.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/json_record.h"

namespace moesaic::data {
namespace {

using nlohmann::json;

class RecordReader {
 public:
  RecordReader(std::string_view line, const std::string& where)
      : where_(where), record_(parse_json_record(line, where)) {}

  std::vector<ChatPiece> pieces() const {
    const bool chat = record_.contains("messages"), pair = record_.contains("prompt");
    if (chat == pair) {
      refuse(fmt::format(
          "a record needs either \"messages\" or \"prompt\" and \"completion\"; found the keys: "
          "{}{}",
          keys_for_message(record_),
          record_.contains("text") ? "; plain text is prepared with 'moesaic data tokenize'" : ""));
    }
    return chat ? messages() : completion();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
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
  json record_;
};

}  // namespace

std::vector<ChatPiece> parse_chat_record(std::string_view line, const std::string& where) {
  return RecordReader(line, where).pieces();
}

}  // namespace moesaic::data
