#include <fmt/format.h>

#include "core/config/node.h"
#include "tests/support/catch.h"

using moesaic::config::Node;
using moesaic::config::parse_yaml;
using moesaic::config::Problem;

namespace {

/// The only problem of a text, as "line:column key: message".
std::string complaint(const std::string& text) {
  std::vector<Problem> problems;
  parse_yaml(text, "f", problems);
  REQUIRE(problems.size() == 1);
  return to_string(problems[0]);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("config: the tree knows kinds, quotes and positions") {
  std::vector<Problem> problems;
  const Node root = parse_yaml("a: 1\nb:\n  - x\n  - 'y'\nc: {d: }\n", "f", problems);
  REQUIRE(problems.empty());
  REQUIRE(root.kind == Node::Kind::map);
  REQUIRE(root.children.size() == 3);
  const Node& a = *root.find("a");
  CHECK(a.text == "1");
  CHECK_FALSE(a.quoted);
  CHECK(a.at.line == 1);
  CHECK(a.at.column == 4);
  const Node& b = *root.find("b");
  REQUIRE(b.children.size() == 2);
  CHECK(b.children[1].text == "y");
  CHECK(b.children[1].quoted);
  CHECK(b.children[1].at.line == 4);
  CHECK(b.children[1].at.column == 5);
  const Node& d = *root.find("c")->find("d");
  CHECK(d.kind == Node::Kind::null);
  CHECK(d.blame().line == 5);
  CHECK(d.blame().column == 5);
  CHECK(root.find("e") == nullptr);
}

TEST_CASE("config: an empty text is a null node") {
  std::vector<Problem> problems;
  CHECK(parse_yaml("", "f", problems).kind == Node::Kind::null);
  CHECK(parse_yaml("# only a comment\n", "f", problems).kind == Node::Kind::null);
  CHECK(problems.empty());
}

TEST_CASE("config: YAML traps are refused with their position") {
  CHECK(has(complaint("a: 1\nb: 2\na: 3\n"),
            "f:3:1 a: given twice in this file; the first is in line 1"));
  CHECK(has(complaint("x: {a: 1, a: 2}\n"), "f:1:11 x.a: given twice"));
  CHECK(has(complaint("a: &n 1\n"), "a: anchors"));
  CHECK(has(complaint("a: &n {b: *n}\n"), "anchors"));
  CHECK(has(complaint("a: *n\n"), "f:1:4"));
  CHECK(has(complaint("a: !!int 3\n"), "f:1:4 a: the tag"));
  CHECK(has(complaint("a: 1\n---\nb: 2\n"), "a second document"));
  CHECK(has(complaint("a:\n\tb: 1\n"), "f:2:1 a tab in the indentation"));
  CHECK(has(complaint("{[1]: 2}\n"), "a key must be a plain word"));
  CHECK(has(complaint("? {a: 1}\n: 2\n"), "a key must be a plain word"));
  CHECK(has(complaint(": 2\n"), "a key is missing"));
  CHECK(has(complaint(std::string("a: 1\0b", 6)), "f:1:5 a control character"));
  CHECK(has(complaint("a: \xFF\n"), "f:1:4 not UTF-8"));
  CHECK(has(complaint("a: \xC0\x80\n"), "not UTF-8"));
  CHECK(has(complaint("a: \xE4"), "not UTF-8"));
  CHECK(has(complaint("a: [1, 2\n"), "not valid YAML"));
  CHECK(has(complaint("a: \"x"), "not valid YAML"));
}

TEST_CASE("config: a value that swallows the next line is refused") {
  CHECK(has(complaint("a: \"x\nb: 2\n"), "f:1:4 a: the closing quote is missing"));
  CHECK(has(complaint("a: 'x\nb: 2\n"), "f:1:4 a: the closing quote is missing"));
  CHECK(has(complaint("a: 'x''y\nb: 2\n'\n"), "the closing quote is missing"));
  CHECK(has(complaint("a: \"x\\\ny\"\n"), "the closing quote is missing"));
  CHECK(has(complaint("a: x\n  y\n"), "f:1:4 a: a value that goes on in the next line"));
  CHECK(has(complaint("a: |\n  y\n"), "a block of text"));
  std::vector<Problem> problems;
  const Node root = parse_yaml(
      "\xEF\xBB\xBF"
      "a: 'it''s'\nb: \"\\\"x\"\nc: \xC3\xA4 'x' # y\nd: \"\xC3\xA4\"\r\ne: p q\r\n",
      "f",
      problems);
  REQUIRE(problems.empty());
  CHECK(root.find("a")->text == "it's");
  CHECK(root.find("b")->text == "\"x");
  CHECK(root.find("c")->text == "\xC3\xA4 'x'");
  CHECK(root.find("d")->text == "\xC3\xA4");
  CHECK(root.find("e")->text == "p q");
}

TEST_CASE("config: alias bombs and deep nesting end at once") {
  std::string bomb = "a0: &a0 [x, x]\n";
  for (int i = 1; i < 40; ++i)
    bomb += fmt::format("a{0}: &a{0} [*a{1}, *a{1}]\n", i, i - 1);
  CHECK(has(complaint(bomb), "f:1:"));
  CHECK(has(complaint(std::string(100'000, '[')), "f:1:"));
  CHECK(has(complaint("a: " + std::string(100'000, '{')), "f:1:"));
  CHECK(has(complaint("a: " + std::string(33, '[') + std::string(33, ']')), "nested more than 32"));
  std::string dashes;
  for (int i = 0; i < 50'000; ++i)
    dashes += "- ";
  CHECK(has(complaint(dashes), "nested more than 32"));
}

TEST_CASE("config: the size cap") {
  const std::string comment(moesaic::config::kMaxYamlBytes, '#');
  std::vector<Problem> problems;
  CHECK(parse_yaml(comment, "f", problems).kind == Node::Kind::null);
  CHECK(problems.empty());
  CHECK(has(complaint(comment + "#"), "larger than 1048576 bytes"));
}

TEST_CASE("config: files that cannot be read") {
  std::vector<Problem> problems;
  moesaic::config::parse_yaml_file("/nonexistent/x.yaml", problems);
  moesaic::config::parse_yaml_file("/", problems);
  moesaic::config::parse_yaml_file("/dev/zero", problems);
  REQUIRE(problems.size() == 3);
  CHECK(to_string(problems[0]) ==
        "/nonexistent/x.yaml: cannot read this file: No such file or directory");
  CHECK(has(to_string(problems[1]), "it is a folder"));
  CHECK(has(to_string(problems[2]), "larger than"));
}
