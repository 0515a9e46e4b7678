#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::data {

/// A question with several possible continuations of a text, one of which is right.
struct ChoiceRecord {
  std::string context;               ///< may be empty
  std::vector<std::string> choices;  ///< at least two, none empty
  std::size_t answer = 0;            ///< the right one, from 0
};

inline constexpr std::size_t kMaxChoiceRecordBytes = std::size_t{8} << 20;
inline constexpr std::size_t kMaxChoices = 1024;

/// One line of a file of choices:
///   {"context": "The capital of France is", "choices": [" Berlin", " Paris"], "answer": 1}
/// A choice stands directly behind the context: the space between them is part of one of the two. Other keys are ignored.
/// Throws InputError "where: …" that says what is expected: for what is not JSON (UTF-8) of this form, more than 8 MiB or 64
/// levels, a key given twice, fewer than two or more than 1024 choices, an empty one, an answer that is none of them.
ChoiceRecord parse_choice_record(std::string_view line, const std::string& where);

}  // namespace moesaic::data
