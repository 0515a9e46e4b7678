#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::data {

/// A part of a conversation's text. Targets are what the model learns to write. Marks are the template's own text, where
/// a tokenizer's special tokens count; text that somebody wrote spells none.
struct ChatPiece {
  std::string text;
  bool is_target = false;
  bool is_mark = false;
};

inline constexpr std::size_t kMaxChatRecordBytes = std::size_t{64} << 20;
inline constexpr int kMaxChatRecordDepth = 16;

/// One line of a chat file as text. Two forms:
///   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
///     every message becomes <|im_start|>ROLE, a newline, CONTENT, <|im_end|>; a newline stands between two messages.
///     Targets are the contents of role "assistant" and the <|im_end|> behind them.
///   {"prompt": "…", "completion": "…"}
///     the two texts as they are; the completion is the target.
/// Other keys of the record and of messages are ignored. Throws InputError "where: …" for what is not JSON (UTF-8) of one of
/// these forms, given twice, deeper than 16 levels, longer than 64 MiB, or without a target.
std::vector<ChatPiece> parse_chat_record(std::string_view line, const std::string& where);

}  // namespace moesaic::data
