#include "core/data/choice_record.h"

#include <cstdint>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_value.h"

namespace moesaic::data {
namespace {

constexpr std::size_t kShownKeys = 8, kShownKeyBytes = 30;

// For a message; a key may be cut inside a character.
std::string shown_keys(const JsonValue& record) {
  std::string text;
  for (std::size_t i = 0; i < record.keys.size() && i < kShownKeys; ++i)
    text += (i > 0 ? ", " : "") + record.keys[i].substr(0, kShownKeyBytes);
  return text.empty() ? "none" : text;
}

JsonNode member(const JsonNode& record, const char* key) {
  if (record.object().find(key) == nullptr)
    record.fail(fmt::format("no \"{}\"; expected {}; found the keys: {}",
                            key,
                            R"({"context": "…", "choices": ["…", "…"], "answer": 0})",
                            shown_keys(record.value())));
  return record.member(key);
}

}  // namespace

ChoiceRecord parse_choice_record(std::string_view line, const std::string& where) {
  if (line.size() > kMaxChoiceRecordBytes)
    throw InputError(fmt::format(
        "{}: a record of {} bytes, allowed {}", where, line.size(), kMaxChoiceRecordBytes));
  const JsonValue value = parse_json(line, where, {.first_byte = 1});
  const JsonNode record(value, where);
  ChoiceRecord result{.context = member(record, "context").text(), .choices = {}, .answer = 0};
  const JsonNode choices = member(record, "choices");
  const std::size_t count = choices.list().size();
  if (count < 2 || count > kMaxChoices)
    choices.fail(fmt::format("holds {} texts, allowed: 2 to {}", count, kMaxChoices));
  for (std::size_t i = 0; i < count; ++i) {
    result.choices.push_back(choices.item(i).text());
    if (result.choices.back().empty()) choices.item(i).fail("is empty");
  }
  // The number of the right choice; a letter is none.
  result.answer = static_cast<std::size_t>(
      member(record, "answer").integer(0, static_cast<std::int64_t>(count) - 1));
  return result;
}

}  // namespace moesaic::data
