// Lines of files of questions. Accepted ⇒ two choices or more, one of them the answer, all UTF-8; written as JSON it is the same.
#include "core/data/choice_record.h"

#include <nlohmann/json.hpp>

#include "core/tokenizer/utf8.h"
#include "tests/fuzz/fuzz.h"

using namespace moesaic;

MOESAIC_FUZZ_TARGET(choice_record) {
  data::ChoiceRecord record;
  if (!fuzz::accepts([&] { record = data::parse_choice_record(input, "a.jsonl:1"); })) return;
  fuzz::require(input.find('\0') == std::string_view::npos, "JSON holds no zero byte");
  fuzz::require(record.choices.size() >= 2 && record.choices.size() <= data::kMaxChoices,
                "there are choices");
  fuzz::require(record.answer < record.choices.size(), "the answer is one of the choices");
  std::size_t bytes = record.context.size();
  for (const std::string& choice : record.choices) {
    fuzz::require(!choice.empty(), "no choice is empty");
    fuzz::require(tokenizer::valid_utf8_prefix(choice) == choice.size(), "choices are UTF-8");
    bytes += choice.size();
  }
  fuzz::require(bytes <= input.size(), "texts are not larger than their record");
  const nlohmann::json again = {
      {"context", record.context}, {"choices", record.choices}, {"answer", record.answer}};
  const data::ChoiceRecord read = data::parse_choice_record(again.dump(), "again");
  fuzz::require(read.context == record.context && read.choices == record.choices &&
                    read.answer == record.answer,
                "a record reads back as the same");
}
