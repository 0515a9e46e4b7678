#include "core/data/chat_record.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "core/base/json_value.h"

namespace moesaic::data {
namespace {

using Kind = JsonValue::Kind;

constexpr JsonLimits kLimits{
    .max_bytes = kMaxChatRecordBytes, .max_depth = kMaxChatRecordDepth, .first_byte = 1};

class RecordReader {
 public:
  RecordReader(std::string_view line, const std::string& where)
      : where_(where), record_(parse_json(line, where, kLimits)) {
    if (!record_.is(Kind::object))
      refuse(fmt::format("is {}, must be a JSON object", kind_name(record_.kind)));
  }

  std::vector<ChatPiece> pieces() const {
    const bool chat = record_.find("messages") != nullptr, pair = record_.find("prompt") != nullptr;
    if (chat == pair) {
      std::vector<std::string> keys;
      for (const auto& key : record_.keys) {
        if (keys.size() == 8) break;
        keys.push_back(key.size() > 30 ? key.substr(0, 30) + "…" : key);
      }
      refuse(fmt::format(
          "a record needs either \"messages\" or \"prompt\" and \"completion\"; found the keys: "
          "{}{}",
          fmt::join(keys, ", "),
          record_.find("text") != nullptr ? "; plain text is prepared with 'moesaic data tokenize'"
                                          : ""));
    }
    return chat ? messages() : completion();
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }

  std::string text_of(const JsonValue& object, const char* key, const std::string& what) const {
    const JsonValue* found = object.find(key);
    if (found == nullptr) refuse(fmt::format("{} has no \"{}\"", what, key));
    if (!found->is(Kind::text)) {
      refuse(fmt::format("\"{}\" of {} is {}, allowed: a text{}",
                         key,
                         what,
                         kind_name(found->kind),
                         found->is(Kind::list) ? " (parts such as images are not supported)" : ""));
    }
    return found->text;
  }

  std::vector<ChatPiece> messages() const {
    const JsonValue& list = *record_.find("messages");
    if (!list.is(Kind::list))
      refuse(fmt::format("\"messages\" is {}, allowed: a list", kind_name(list.kind)));
    std::vector<ChatPiece> pieces;
    bool has_target = false;
    for (std::size_t i = 0; i < list.items.size(); ++i) {
      const JsonValue& message = list.items[i];
      const std::string what = fmt::format("message {}", i);
      if (!message.is(Kind::object))
        refuse(fmt::format("{} is {}, allowed: an object", what, kind_name(message.kind)));
      const std::string role = text_of(message, "role", what);
      const bool plain =
          !role.empty() && role.size() <= 64 && std::all_of(role.begin(), role.end(), [](char c) {
            return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                   c == '_' || c == '-';
          });
      if (!plain) refuse(fmt::format("the role of {} is \"{:.64}\", allowed: a word", what, role));
      const bool target = role == "assistant";
      has_target = has_target || target;
      pieces.push_back({fmt::format("{}<|im_start|>{}\n", i > 0 ? "\n" : "", role), false, true});
      pieces.push_back({text_of(message, "content", what), target, false});
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
  JsonValue record_;
};

}  // namespace

std::vector<ChatPiece> parse_chat_record(std::string_view line, const std::string& where) {
  return RecordReader(line, where).pieces();
}

}  // namespace moesaic::data
