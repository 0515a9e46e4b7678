#include "core/data/choice_record.h"

#include <cstdint>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/json_record.h"

namespace moesaic::data {
namespace {

using nlohmann::json;

constexpr const char* kForm = R"(expected {"context": "…", "choices": ["…", "…"], "answer": 0})";

class ChoiceReader {
 public:
  ChoiceReader(std::string_view line, const std::string& where)
      : where_(where), record_(parse_json_record(line, where)) {}

  ChoiceRecord record() const {
    ChoiceRecord r;
    const json& context = member("context");
    if (!context.is_string())
      refuse(fmt::format("\"context\" is {}, allowed: a text", context.type_name()));
    r.context = context.get<std::string>();
    r.choices = choices();
    r.answer = answer(r.choices.size());
    return r;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }

  const json& member(const char* key) const {
    const auto it = record_.find(key);
    if (it == record_.end())
      refuse(
          fmt::format("no \"{}\"; {}; found the keys: {}", key, kForm, keys_for_message(record_)));
    return *it;
  }

  std::vector<std::string> choices() const {
    const json& list = member("choices");
    if (!list.is_array())
      refuse(fmt::format("\"choices\" is {}, allowed: a list of texts", list.type_name()));
    if (list.size() < 2 || list.size() > kMaxChoices)
      refuse(fmt::format("\"choices\" holds {} texts, allowed: 2 to {}", list.size(), kMaxChoices));
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!list[i].is_string())
        refuse(fmt::format("choice {} is {}, allowed: a text", i, list[i].type_name()));
      texts.push_back(list[i].get<std::string>());
      if (texts.back().empty()) refuse(fmt::format("choice {} is empty", i));
    }
    return texts;
  }

  std::size_t answer(std::size_t count) const {
    const json& value = member("answer");
    const std::string allowed =
        fmt::format("allowed: the number of the right choice, from 0 to {}", count - 1);
    if (!value.is_number_integer())
      refuse(fmt::format("\"answer\" is {}, {}", shown(value), allowed));
    // What is negative is no unsigned number to the parser; what does not fit 64 bits is a float.
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= count)
      refuse(fmt::format("\"answer\" is {}, {}", value.dump(), allowed));
    return static_cast<std::size_t>(value.get<std::uint64_t>());
  }

  // Short values as they are, others by their type.
  static std::string shown(const json& value) {
    if (!value.is_structured()) {
      const std::string text = value.dump();
      if (text.size() <= 30) return text;
    }
    return value.type_name();
  }

  const std::string& where_;
  json record_;
};

}  // namespace

ChoiceRecord parse_choice_record(std::string_view line, const std::string& where) {
  return ChoiceReader(line, where).record();
}

}  // namespace moesaic::data
