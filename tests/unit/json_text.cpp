// The reader of JSON that others wrote: what it refuses, where it says that is, and what it passes on.
#include "core/base/json_text.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_value.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

std::string refusal(const std::string& text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, "f", limits);
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}
bool begins(const std::string& text, const std::string& with) {
  INFO(text);
  CHECK(text.substr(0, with.size()) == with);
  return text.substr(0, with.size()) == with;
}

}  // namespace

TEST_CASE("JSON: a key given twice in one object is refused where it stands", "[json]") {
  begins(refusal(R"({"a": 1, "a": 2})"), "f:9: the key \"a\" is given twice in one object");
  begins(refusal(R"({"a": 1, "\u0061": 2})"), "f:9: the key \"a\" is given twice");
  begins(refusal(R"({"x\\\"": 1, "x\\\"" : 2})"), "f:13: the key \"x\\\"\" is given twice");
  begins(refusal(R"([{"b": {"a": 1, "c": {}, "a": 2}}])"), "f:25: the key \"a\"");
  begins(refusal(R"({"": 1, "": 2})", {.first_byte = 1}), "f:9: the key \"\"");
  std::string many = "{";
  for (int i = 0; i < 40; ++i)
    many += fmt::format("\"{}\": {}, ", i, i);
  const std::string place = fmt::format("f:{}: the key", many.size());
  begins(refusal(many + "\"3\": 1}"), place + " \"3\"");
  begins(refusal(many + "\"39\": 1}"), place + " \"39\"");
  CHECK(refusal(many + "\"40\": 1}") == "accepted");
  CHECK(refusal(R"([{"a": 1}, {"a": {"a": [{"a": 1}, {"a": 1}]}}, {"A": 1, "a": 2}])") ==
        "accepted");
  const std::string longest(100, 'k');
  const std::string said = refusal("{\"" + longest + "\": 1, \"" + longest + "\": 2}");
  CHECK(said.find(longest.substr(0, 60) + "…") != std::string::npos);
}

TEST_CASE("JSON: zero bytes, depth, size and broken text are refused where they stand", "[json]") {
  begins(refusal(std::string("{}\0", 3)), "f:2: not valid JSON: a zero byte");
  begins(refusal(std::string("{}\0{", 4), {.first_byte = 8}), "f:10: not valid JSON: a zero byte");
  begins(refusal("[[[", {.max_depth = 2}), "f:2: nested more than 2 deep");
  CHECK(refusal("[[], {}]", {.max_depth = 2}) == "accepted");
  begins(refusal("[1, 2]", {.max_bytes = 5}), "f: 6 bytes; at most 5");
  begins(refusal("{\"a\": x}"), "f:6: not valid JSON: syntax error");
  begins(refusal("{} x"), "f:3: not valid JSON: syntax error");
  begins(refusal("[1,"), "f:3: not valid JSON: syntax error");
  begins(refusal(""), "f:0: not valid JSON: syntax error");
  begins(refusal("[\"\xFF\"]"), "f:2: not valid JSON: syntax error");
  begins(refusal("[1e999]"), "f:");
  CHECK(refusal("[" + std::string(100000, '"')).size() < 500);
  CHECK(refusal("[\"" + std::string(100000, 'x')).size() < 500);
}

TEST_CASE("JSON: numbers are integers as far as 64 bits with sign go", "[json]") {
  using Kind = JsonValue::Kind;
  const JsonValue list = parse_json(
      "[9223372036854775807, -9223372036854775808, 9223372036854775808, 18446744073709551616, 1.0, "
      "1e2, -0]",
      "f");
  REQUIRE(list.items.size() == 7);
  CHECK(list.items[0].integer == INT64_MAX);
  CHECK(list.items[1].integer == INT64_MIN);
  for (std::size_t i = 2; i < 6; ++i)
    CHECK(list.items[i].is(Kind::real));
  CHECK(list.items[2].real == 9223372036854775808.0);
  CHECK(list.items[5].real == 100);
}

TEST_CASE("JSON: no source parses it past the reader", "[json]") {
  namespace fs = std::filesystem;
  int files = 0;
  for (const char* folder : {"apps", "core"}) {
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(MOESAIC_SOURCE_DIR) / folder)) {
      const std::string path = entry.path().lexically_relative(MOESAIC_SOURCE_DIR).string();
      if (entry.path().extension() != ".cpp" || path == "core/base/json_text.cpp") continue;
      if (path == "apps/doctor/report.cpp") continue;  // what ranks of one program send each other
      std::ifstream file(entry.path());
      const std::string text{std::istreambuf_iterator<char>(file),
                             std::istreambuf_iterator<char>()};
      ++files;
      const bool parses = text.find("son::parse(") != std::string::npos ||
                          text.find("sax_parse(") != std::string::npos;
      INFO(
          entry.path().string() << " must use parse_json(), or check_json() before its own parser");
      CHECK((!parses || text.find("check_json(") != std::string::npos));
    }
  }
  CHECK(files > 100);
}

TEST_CASE("JSON: members of large objects are found without a walk through all", "[json]") {
  constexpr int kMembers = 100000;
  std::string text = "{";
  for (int i = 0; i < kMembers; ++i)
    text += fmt::format("{}\"{}\": {}", i > 0 ? "," : "", i * 7, i);
  const JsonValue value = parse_json(text + "}", "f");
  const JsonNode node(value, "f");
  const auto start = std::chrono::steady_clock::now();
  std::int64_t wrong = 0;
  for (int i = 0; i < kMembers; ++i)
    wrong += node.member(std::to_string(i * 7)).value().integer == i ? 0 : 1;
  CHECK(wrong == 0);
  CHECK(node.member_or_null("3").is_null());
  CHECK(node.member_or_null("x").is_null());
  // A walk makes 5e9 comparisons of this.
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(3));
}
