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
          Case{"", "q.jsonl:7: not JSON"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 0)", "not JSON"},
          Case{"[1]", "not a JSON object"},
          Case{
              R"({"choices": ["b", "c"], "answer": 0})",
              R"(no "context"; expected {"context": "…", "choices": ["…", "…"], "answer": 0}; found the keys: answer, choices)"},
          Case{R"({})", "found the keys: none"},
          Case{R"({"context": "a", "answer": 0})", R"(no "choices")"},
          Case{R"({"context": "a", "choices": ["b", "c"]})", R"(no "answer")"},
          Case{R"({"context": 1, "choices": ["b", "c"], "answer": 0})",
               R"("context" is number, allowed: a text)"},
          Case{R"({"context": "a", "choices": "bc", "answer": 0})",
               R"("choices" is string, allowed: a list of texts)"},
          Case{R"({"context": "a", "choices": ["b"], "answer": 0})",
               R"("choices" holds 1 texts, allowed: 2 to 1024)"},
          Case{R"({"context": "a", "choices": ["b", null], "answer": 0})",
               "choice 1 is null, allowed: a text"},
          Case{R"({"context": "a", "choices": ["b", ""], "answer": 0})", "choice 1 is empty"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 2})",
               R"("answer" is 2, allowed: the number of the right choice, from 0 to 1)"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": -1})", R"("answer" is -1)"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": "B"})", R"("answer" is "B")"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 1.0})", R"("answer" is 1.0)"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": [1]})", R"("answer" is array)"},
          Case{R"({"context": "a", "choices": ["b", "c"], "answer": 18446744073709551616})",
               R"("answer" is 1.8446744073709552e+19)"},
          Case{R"({"context": "a", "context": "b", "choices": ["b", "c"], "answer": 0})",
               R"(the key "context" is given twice)"},
          Case{"{\"context\": \"\xff\", \"choices\": [\"b\", \"c\"], \"answer\": 0}", "not JSON"},
      }) {
    INFO(c.line);
    CHECK(has(refusal(c.line), c.message));
    CHECK(refusal(c.line).rfind("q.jsonl:7: ", 0) == 0);
  }
  std::string many = R"({"context": "a", "choices": ["b")";
  for (std::size_t i = 1; i <= kMaxChoices; ++i)
    many += R"(, "b")";
  CHECK(has(refusal(many + R"(], "answer": 0})"), "holds 1025 texts"));
  CHECK(has(refusal(R"({"context": )" + std::string(40, '[') + std::string(40, ']') + "}"),
            "nested deeper than 16 levels"));
  CHECK(has(refusal(std::string("{\"context\": \"a\"}\0 ", 17)), "a zero byte"));
}

}  // namespace moesaic::data
