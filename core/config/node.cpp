#include "core/config/node.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

namespace moesaic::config {
namespace {

/// Ends a parse whose rest would make no sense.
struct Stop {
  Problem problem;
};

/// Builds our tree from yaml-cpp's events. The events show what its Node interface hides: anchors,
/// duplicate keys, quotes, and the depth before anything recursive is built.
class Builder : public YAML::EventHandler {
 public:
  Builder(std::string_view source, const std::string& file, std::vector<Problem>& problems)
      : source_(source), file_(file), problems_(problems) {}

  Node root;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ > 1)
      stop(mark, "a second document starts here; one file holds one configuration");
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    refuse_anchor(mark, anchor);
    if (expects_key()) stop(mark, "a key is missing before ':'");
    value(make(Node::Kind::null, mark));
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override { refuse_anchor(mark, 1); }
  void OnScalar(const YAML::Mark& mark,
                const std::string& tag,
                YAML::anchor_t anchor,
                const std::string& text) override {
    refuse_anchor(mark, anchor);
    // yaml-cpp marks plain scalars by the tag "?", quoted and block ones by "!".
    refuse_tag(mark, tag);
    refuse_several_lines(mark, tag == "!", text);
    if (expects_key()) return start_entry(mark, text);
    Node node = make(Node::Kind::scalar, mark);
    node.text = text;
    node.quoted = tag == "!";
    value(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark,
                       const std::string& tag,
                       YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    push(Node::Kind::list, mark, tag, anchor);
  }
  void OnSequenceEnd() override { pop(); }
  void OnMapStart(const YAML::Mark& mark,
                  const std::string& tag,
                  YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    push(Node::Kind::map, mark, tag, anchor);
  }
  void OnMapEnd() override { pop(); }

 private:
  struct Frame {
    Node node;
    bool has_key = false;  ///< a key was read, its value comes next
    std::string key;
    Position key_at;
  };

  Position position(const YAML::Mark& mark) const {
    return {file_, mark.line + 1, mark.column + 1};
  }
  Problem problem(const YAML::Mark& mark, std::string message) const {
    return {file_, mark.line + 1, mark.column + 1, path(), std::move(message)};
  }
  [[noreturn]] void stop(const YAML::Mark& mark, std::string message) const {
    throw Stop{problem(mark, std::move(message))};
  }

  std::string path() const {
    std::string text;
    for (const Frame& frame : stack_) {
      if (frame.node.kind == Node::Kind::list)
        text += fmt::format("[{}]", frame.node.children.size());
      else if (frame.has_key)
        text += (text.empty() ? "" : ".") + frame.key;
    }
    return text;
  }
  Node make(Node::Kind kind, const YAML::Mark& mark) const {
    Node node;
    node.kind = kind;
    node.at = position(mark);
    return node;
  }
  void refuse_anchor(const YAML::Mark& mark, YAML::anchor_t anchor) const {
    if (anchor != 0)
      stop(mark,
           "anchors (&name) and aliases (*name) are not accepted; write the value out, share "
           "settings through 'base: FILE', or quote a text that starts with * or &");
  }
  void refuse_tag(const YAML::Mark& mark, const std::string& tag) const {
    if (!tag.empty() && tag != "?" && tag != "!")
      stop(mark, fmt::format("the tag '{}' is not accepted; types come from the key", tag));
  }
  /// yaml-cpp 0.7 ends an open quote at the end of the file and joins lines that lack a colon: both
  /// swallow settings.
  void refuse_several_lines(const YAML::Mark& mark, bool quoted, const std::string& text) const {
    const std::string_view rest =
        source_.substr(std::min(static_cast<std::size_t>(mark.pos), source_.size()));
    if (!quoted) {
      if (!rest.starts_with(text))
        stop(mark,
             "a value that goes on in the next line; is a ':' missing, or the indentation wrong?");
      return;
    }
    const char quote = rest.empty() ? '\0' : rest[0];
    if (quote != '"' && quote != '\'')
      stop(mark, "a block of text ('|' or '>') is not accepted; write it in quotes, in one line");
    for (std::size_t i = 1; i < rest.size() && rest[i] != '\n'; ++i) {
      const char next = i + 1 < rest.size() ? rest[i + 1] : '\n';
      const bool escape =
          quote == '"' ? rest[i] == '\\' && next != '\n' : rest[i] == quote && next == quote;
      if (escape)
        ++i;
      else if (rest[i] == quote)
        return;
    }
    stop(mark, "the closing quote is missing in this line");
  }
  bool expects_key() const {
    return !stack_.empty() && stack_.back().node.kind == Node::Kind::map && !stack_.back().has_key;
  }
  void start_entry(const YAML::Mark& mark, const std::string& key) {
    Frame& frame = stack_.back();
    frame.has_key = true;
    frame.key = key;
    frame.key_at = position(mark);
  }
  void push(Node::Kind kind,
            const YAML::Mark& mark,
            const std::string& tag,
            YAML::anchor_t anchor) {
    refuse_anchor(mark, anchor);
    refuse_tag(mark, tag);
    if (expects_key()) stop(mark, "a key must be a plain word");
    if (stack_.size() >= kMaxYamlDepth)
      stop(mark, fmt::format("nested more than {} levels deep", kMaxYamlDepth));
    stack_.push_back({make(kind, mark), false, {}, {}});
  }
  void pop() {
    Node node = std::move(stack_.back().node);
    stack_.pop_back();
    value(std::move(node));
  }
  [[noreturn]] void too_many(const Node& node, const std::string& what) const {
    throw Stop{
        {file_, node.at.line, node.at.column, path(), what + "; this is not a configuration"}};
  }
  void value(Node node) {
    if (++values_ > kMaxYamlValues)
      too_many(node, fmt::format("more than {} values", kMaxYamlValues));
    if (stack_.empty()) {
      root = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.kind == Node::Kind::map) {
      if (frame.node.children.size() >= kMaxYamlEntries) {
        too_many(node, fmt::format("more than {} keys in one group", kMaxYamlEntries));
      }
      node.key = frame.key;
      node.key_at = frame.key_at;
      if (const Node* first = frame.node.find(node.key)) {
        const Position& at = node.key_at;
        problems_.push_back(
            {file_,
             at.line,
             at.column,
             path(),
             fmt::format("given twice in this file; the first is in line {}", first->key_at.line)});
        frame.has_key = false;
        return;
      }
      frame.has_key = false;
    }
    frame.node.children.push_back(std::move(node));
  }

  std::string_view source_;
  const std::string& file_;
  std::vector<Problem>& problems_;
  std::vector<Frame> stack_;
  int documents_ = 0;
  std::size_t values_ = 0;
};

/// Length of the UTF-8 sequence at `text[i]`, 0 if it is not valid.
std::size_t utf8_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t j) {
    return j < text.size() ? static_cast<std::uint8_t>(text[j]) : std::uint8_t{0};
  };
  const std::uint8_t lead = byte(i);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  for (std::size_t j = 1; j < length; ++j) {
    if ((byte(i + j) & 0xC0) != 0x80) return 0;
  }
  const std::uint8_t second = byte(i + 1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool surrogate = lead == 0xED && second >= 0xA0;
  const bool beyond = lead == 0xF4 && second >= 0x90;
  return overlong || surrogate || beyond ? 0 : length;
}

/// Refuses what a reader of the text would not see: control characters, broken UTF-8, tabs as
/// indentation.
void scan_characters(std::string_view text, const std::string& file) {
  int line = 1;
  int column = 1;
  bool indentation = true;
  const auto stop = [&](const char* message) { throw Stop{{file, line, column, "", message}}; };
  for (std::size_t i = 0; i < text.size();) {
    const char c = text[i];
    const auto code = static_cast<std::uint8_t>(c);
    if (c == '\t' && indentation) stop("a tab in the indentation; indent with spaces");
    if ((code < 0x20 && c != '\n' && c != '\r' && c != '\t') || code == 0x7F)
      stop("a control character; this is not a YAML text");
    const std::size_t length = utf8_length(text, i);
    if (length == 0) stop("not UTF-8 text");
    i += length;
    indentation = c == '\n' || (indentation && c == ' ');
    column = c == '\n' ? 1 : column + 1;
    line += c == '\n';
  }
}

void read_document(std::string_view text, const std::string& file, Builder& builder) {
  if (text.size() > kMaxYamlBytes) {
    throw Stop{{file,
                0,
                0,
                "",
                fmt::format("larger than {} bytes; this is not a configuration", kMaxYamlBytes)}};
  }
  scan_characters(text, file);
  std::istringstream stream{std::string(text)};
  YAML::Parser parser(stream);
  while (parser.HandleNextDocument(builder)) {
  }
}

}  // namespace

const Node* Node::find(std::string_view name) const {
  if (kind != Kind::map) return nullptr;
  const auto it = std::find_if(
      children.begin(), children.end(), [&](const Node& child) { return child.key == name; });
  return it == children.end() ? nullptr : &*it;
}

Node* Node::find(std::string_view name) {
  return const_cast<Node*>(std::as_const(*this).find(name));
}

Node parse_yaml(std::string_view text, const std::string& file, std::vector<Problem>& problems) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  Builder builder(text, file, problems);
  builder.root.at = {file, 1, 1};
  try {
    read_document(text, file, builder);
  } catch (const Stop& stop) {
    problems.push_back(stop.problem);
  } catch (const YAML::Exception& error) {
    problems.push_back(
        {file, error.mark.line + 1, error.mark.column + 1, "", "not valid YAML: " + error.msg});
  }
  return std::move(builder.root);
}

Node parse_yaml_file(const std::string& path, std::vector<Problem>& problems) {
  Node nothing;
  nothing.at = {path, 1, 1};
  const auto unreadable = [&](const std::string& why) {
    problems.push_back({path, 0, 0, "", "cannot read this file: " + why});
    return nothing;
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return unreadable("it is a folder");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return unreadable(std::strerror(errno));
  // One byte more than allowed, so that an endless file is refused and not read.
  std::string text(kMaxYamlBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (stream.bad()) return unreadable("read error");
  text.resize(static_cast<std::size_t>(stream.gcount()));
  return parse_yaml(text, path, problems);
}

void merge(Node& under, Node over) {
  if (under.kind != Node::Kind::map || over.kind != Node::Kind::map) {
    under = std::move(over);
    return;
  }
  under.at = over.at;
  under.key_at = over.key_at;
  for (Node& entry : over.children) {
    if (Node* present = under.find(entry.key))
      merge(*present, std::move(entry));
    else
      under.children.push_back(std::move(entry));
  }
}

}  // namespace moesaic::config
