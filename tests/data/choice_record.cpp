// Questions with several choices, a line of JSON each.
#include "core/data/choice_record.h"

#include <string>

#include "core/base/error.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

// What a line is refused with.
std::string refusal(const std::string& line) {
  try {
    parse_choice_record(line, "q.jsonl:7");
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("choice records: texts, the answer, other keys") {
  const ChoiceRecord r = parse_choice_record(
      R"({"id": "x", "context": "2 + 2 =", "choices": [" 3", " 4", " vier é"], "answer": 1, "more": [1, {"a": 2}]})",
      "q.jsonl:1");
  CHECK(r.context == "2 + 2 =");
  CHECK(r.choices == std::vector<std::string>{" 3", " 4", " vier é"});
  CHECK(r.answer == 1);
  CHECK(parse_choice_record(R"({"context": "", "choices": ["a", "b"], "answer": 0})", "w")
            .context.empty());
}

TEST_CASE("choice records: what is wrong is said with file and line") {
  struct Case {
    const char *line, *message;
  };
  for (
      const Case& c : {
          Case{"", "not valid JSON"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 0)", "not valid JSON"},
          Case{"[1]", "is a list, must be an object"},
          Case{
              R"({"choices": ["b", "c"], "answer": 0})",
              R"(no "context"; expected {"context": "…", "choices": ["…", "…"], "answer": 0}; found the keys: choices, answer)"},
          Case{R"({})", "found the keys: none"},
          Case{R"({"context": "a", "answer": 0})", R"(no "choices")"},
          Case{R"({"context": "a", "choices": ["b", "c"]})", R"(no "answer")"},
          Case{R"({"context": 1, "choices": ["b", "c"], "answer": 0})",
               "context: is an integer, must be a string"},
          Case{R"({"context": "a", "choices": "bc", "answer": 0})",
               "choices: is a string, must be a list"},
          Case{R"({"context": "a", "choices": ["b"], "answer": 0})",
               "choices: holds 1 texts, allowed: 2 to 1024"},
          Case{R"({"context": "a", "choices": ["b", null], "answer": 0})",
               "choices[1]: is null, must be a string"},
          Case{R"({"context": "a", "choices": ["b", ""], "answer": 0})", "choices[1]: is empty"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 2})",
               "answer: is 2, must be 0 to 1"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": -1})",
               "answer: is -1, must be 0 to 1"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": "B"})",
               "answer: is a string, must be an integer"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 1.0})",
               "answer: is a number that is no integer of 64 bits, must be an integer"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": [1]})",
               "answer: is a list, must be an integer"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 18446744073709551616})",
               "answer: is a number that is no integer of 64 bits, must be an integer"},
          Case{R"({"context": "a", "context": "b", "choices": ["b", "c"], "answer": 0})",
               R"(the key "context" is given twice in one object)"},
          Case{"{\"context\": \"\xff\", \"choices\": [\"b\", \"c\"], \"answer\": 0}",
               "not valid JSON"},
      }) {
    INFO(c.line);
    CHECK(has(refusal(c.line), c.message));
    CHECK(refusal(c.line).rfind("q.jsonl:7:", 0) == 0);
  }
  std::string many = R"({"context": "a", "choices": ["b")";
  for (std::size_t i = 1; i <= kMaxChoices; ++i)
    many += R"(, "b")";
  CHECK(has(refusal(many + R"(], "answer": 0})"), "holds 1025 texts"));
  CHECK(has(refusal(R"({"context": )" + std::string(70, '[') + std::string(70, ']') + "}"),
            "nested more than 64 deep"));
  CHECK(has(refusal(std::string("{\"context\": \"a\"}\0 ", 17)), "a zero byte"));
}

}  // namespace moesaic::data
