#include "core/config/reader.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/config/nearest.h"
#include "core/config/scalar.h"
#include "core/config/suggest.h"

namespace moesaic::config {
namespace {

/// The value as found, short and on one line.
std::string found(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return "no value";
    case Node::Kind::list:
      return "a list";
    case Node::Kind::map:
      return "a group of keys";
    case Node::Kind::scalar:
      break;
  }
  constexpr std::size_t kShown = 60;
  std::string text = node.text.size() > kShown ? node.text.substr(0, kShown) + "…" : node.text;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return node.quoted ? fmt::format("\"{}\"", text) : text;
}

// What to write where a list belongs and one value, or one group, stands.
std::string as_list(const Type& item, const Node& node) {
  const bool is_text = item.kind == Kind::text || item.kind == Kind::choice;
  if (node.kind == Node::Kind::scalar && (is_text || !node.quoted))
    return fmt::format("write it as a list, [{}]", found(node));
  if (node.kind != Node::Kind::map) return "";
  return item.kind == Kind::group ? "write a list of groups, [{…}, {…}]"
                                  : "write a list of values, [value, value]";
}

double unit_seconds(Unit unit) {
  return unit == Unit::minutes ? 60.0 : 1.0;
}

bool is_time(Unit unit) {
  return unit == Unit::minutes || unit == Unit::seconds;
}

}  // namespace

std::string to_string(const Origin& origin) {
  switch (origin.source) {
    case Origin::Source::preset:
      return "default";
    case Origin::Source::command_line:
      return kCommandLine;
    case Origin::Source::file:
      break;
  }
  return fmt::format("{}:{}:{}", origin.file, origin.line, origin.column);
}

void Reader::problem(const Position& at, const std::string& path, std::string message) {
  problems_.push_back({at.file, at.line, at.column, path, std::move(message)});
}

void Reader::wrong(const Field& field,
                   const Type& type,
                   const Node& node,
                   const std::string& path,
                   const std::string& why) {
  problem(node.blame(),
          path,
          fmt::format("found {}{}{}; allowed: {}",
                      found(node),
                      why.empty() ? "" : ": ",
                      why,
                      allowed_text(field, type)));
}

void Reader::remember(const Node& node, const std::string& path) {
  if (!origins_) return;
  const Position& at = node.blame();
  const bool argument = at.file == kCommandLine && at.line == 0;
  (*origins_)[path] = {
      argument ? Origin::Source::command_line : Origin::Source::file, at.file, at.line, at.column};
}

void Reader::section(const Section& section, const Node& node, const std::string& path, void* out) {
  if (node.kind == Node::Kind::null && path.empty()) {
    // An empty file is an empty map: every default, and the list of what is missing.
  } else if (node.kind == Node::Kind::null) {
    problem(node.blame(), path, "has no keys; write keys below it or remove the line");
    return;
  } else if (node.kind != Node::Kind::map) {
    problem(node.at, path, fmt::format("found {}; allowed: a group of keys", found(node)));
    return;
  }
  const Section* const outer = std::exchange(current_, &section);
  for (const Node& child : node.children) {
    const std::string full = path.empty() ? child.key : path + "." + child.key;
    if (const Field* field = section.find(child.key))
      entry(*field, child, full, out);
    else
      problem(child.key_at, full, unknown_key_message(section, path, child.key));
  }
  if (complete_) missing_keys(section, node, path, out);
  current_ = outer;
}

void Reader::missing_keys(const Section& section,
                          const Node& node,
                          const std::string& path,
                          void* out) {
  const Position& at = node.key_at.line > 0 ? node.key_at : node.at;
  for (const Field& field : section.fields) {
    if (node.find(field.key)) continue;
    const std::string full = path.empty() ? field.key : path + "." + field.key;
    if (field.type.kind == Kind::group) {
      // A section that is absent still misses its required keys.
      Node nothing;
      nothing.kind = Node::Kind::map;
      nothing.at = at;
      this->section(*field.type.group, nothing, full, field.address(out));
    } else if (field.is_required) {
      problem(at, full, fmt::format("is required; allowed: {}", allowed_text(field)));
    }
  }
}

void Reader::entry(const Field& field, const Node& node, const std::string& path, void* out) {
  remember(node, path);
  if (node.kind == Node::Kind::null && field.accepts_null) return;
  void* member = field.address(out);
  value(field, field.type, node, path, member);
}

void Reader::value(
    const Field& field, const Type& type, const Node& node, const std::string& path, void* out) {
  switch (type.kind) {
    case Kind::group:
      if (node.kind == Node::Kind::scalar && !type.group->shorthand.empty()) {
        const Field& member = *type.group->find(type.group->shorthand);
        return value(member, member.type, node, path, member.address(out));
      }
      return section(*type.group, node, path, out);
    case Kind::list:
      return list(field, type, node, path, out);
    case Kind::optional:
      if (node.kind == Node::Kind::null) return type.reset(out);
      return value(field, *type.item, node, path, type.emplace(out));
    default:
      break;
  }
  if (node.kind == Node::Kind::scalar) return scalar(field, type, node, path, out);
  wrong(field,
        field.type,
        node,
        path,
        node.kind == Node::Kind::null ? "remove the key to get its default" : "");
}

void Reader::list(
    const Field& field, const Type& type, const Node& node, const std::string& path, void* out) {
  type.clear(out);
  if (field.accepts_one && (node.kind == Node::Kind::scalar ||
                            (node.kind == Node::Kind::map && type.section() != nullptr))) {
    return value(field, *type.item, node, path, type.append(out));
  }
  if (node.kind != Node::Kind::list)
    return wrong(field, type, node, path, as_list(*type.item, node));
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const std::string item_path = fmt::format("{}[{}]", path, i);
    remember(node.children[i], item_path);
    value(field, *type.item, node.children[i], item_path, type.append(out));
  }
}

void Reader::scalar(
    const Field& field, const Type& type, const Node& node, const std::string& path, void* out) {
  const bool is_text = type.kind == Kind::text || type.kind == Kind::choice;
  if (node.quoted && !is_text)
    return wrong(field, type, node, path, "a quoted value is a text; remove the quotes");
  switch (type.kind) {
    case Kind::boolean: {
      const Parsed<bool> parsed = parse_boolean(node.text);
      if (!parsed.value) return wrong(field, type, node, path, parsed.error);
      *static_cast<bool*>(out) = *parsed.value;
      return;
    }
    case Kind::integer:
      return integer(field, node, path, out);
    case Kind::number:
      return number(field, node, path, out);
    case Kind::choice:
      return choice(field, type, node, path, out);
    default:
      if (node.text.empty()) return wrong(field, type, node, path, "must not be empty");
      *static_cast<std::string*>(out) = node.text;
  }
}

void Reader::integer(const Field& field, const Node& node, const std::string& path, void* out) {
  const Parsed<std::int64_t> parsed =
      field.unit == Unit::bytes ? parse_bytes(node.text) : parse_integer(node.text);
  if (!parsed.value) return wrong(field, field.type.leaf(), node, path, parsed.error);
  if (!in_range(field, static_cast<double>(*parsed.value)))
    return wrong(field, field.type.leaf(), node, path, "out of range");
  *static_cast<std::int64_t*>(out) = *parsed.value;
}

void Reader::number(const Field& field, const Node& node, const std::string& path, void* out) {
  const Parsed<double> parsed = is_time(field.unit)
                                    ? parse_duration(node.text, unit_seconds(field.unit))
                                    : parse_number(node.text);
  if (!parsed.value) return wrong(field, field.type.leaf(), node, path, parsed.error);
  if (!in_range(field, *parsed.value))
    return wrong(field, field.type.leaf(), node, path, "out of range");
  *static_cast<double*>(out) = *parsed.value;
}

void Reader::choice(
    const Field& field, const Type& type, const Node& node, const std::string& path, void* out) {
  std::string word = node.text;
  for (const auto& [older, now] : field.older_words)
    if (word == older) word = now;
  const auto it = std::find(type.choices.begin(), type.choices.end(), word);
  if (it != type.choices.end())
    return type.set_choice(out, static_cast<int>(it - type.choices.begin()));
  const std::string near = nearest(node.text, {type.choices.begin(), type.choices.end()});
  wrong(field, type, node, path, near.empty() ? "" : fmt::format("did you mean {}?", near));
}

}  // namespace moesaic::config
