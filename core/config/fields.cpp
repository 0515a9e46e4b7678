#include "core/config/fields.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/config/config.h"
#include "core/config/scalar.h"

namespace moesaic::config {
namespace {

std::string range_text(const Field& field) {
  std::string text;
  const auto number = [&](double x) {
    return field.unit == Unit::bytes ? print_bytes(static_cast<std::int64_t>(x))
                                     : fmt::format("{}", x);
  };
  if (std::isfinite(field.minimum))
    text += fmt::format(
        ", {} {}", field.minimum_excluded ? "above" : "at least", number(field.minimum));
  if (std::isfinite(field.maximum))
    text +=
        fmt::format(", {} {}", field.maximum_excluded ? "below" : "at most", number(field.maximum));
  return text;
}

std::string number_words(const Field& field) {
  switch (field.unit) {
    case Unit::minutes:
      return "a number of minutes or a time such as 90s, 30m, 2h";
    case Unit::seconds:
      return "a number of seconds or a time such as 90s, 30m, 2h";
    default:
      return "a number";
  }
}

/// A group with a shorthand: the keys that differ from their defaults.
std::string group_text(const Section& group, void* values) {
  std::vector<std::string> keys;
  std::string text;
  for (const Field& field : group.fields) {
    const std::string value = value_text(field, field.type, field.address(values));
    const bool is_short = field.key == group.shorthand;
    if (!is_short && value == value_text(field, field.type, field.address(group.defaults.get())))
      continue;
    if (is_short) text = value;
    keys.push_back(field.key + ": " + value);
  }
  return keys.size() == 1 && !text.empty() ? text : fmt::format("{{ {} }}", fmt::join(keys, ", "));
}

}  // namespace

const Field* Section::find(std::string_view key) const {
  const auto it = std::find_if(
      fields.begin(), fields.end(), [&](const Field& field) { return field.key == key; });
  return it == fields.end() ? nullptr : &*it;
}

const Section& root_section() {
  return section_of<Config>();
}

void walk(const Section& section,
          const std::string& prefix,
          const std::function<void(const std::string&, const Field&)>& visit) {
  for (const Field& field : section.fields) {
    const std::string key = prefix.empty() ? field.key : prefix + "." + field.key;
    visit(key, field);
    const bool in_list = field.type.kind == Kind::list;
    if (const Section* group = field.type.section())
      walk(*group, in_list ? key + "[]" : key, visit);
  }
}

std::string allowed_text(const Field& field, const Type& type) {
  switch (type.kind) {
    case Kind::boolean:
      return "true or false";
    case Kind::integer:
      if (field.unit == Unit::bytes)
        return "a size with its unit such as 24GiB" + range_text(field);
      return "an integer" + range_text(field);
    case Kind::number:
      return number_words(field) + range_text(field);
    case Kind::text:
      return field.unit == Unit::path ? "a path" : "a text";
    case Kind::choice:
      return type.choices.size() == 1 ? std::string(type.choices[0])
                                      : fmt::format("one of: {}", fmt::join(type.choices, ", "));
    case Kind::optional:
      return allowed_text(field, *type.item) + ", or null";
    case Kind::list: {
      const std::string item = allowed_text(field, *type.item);
      return field.accepts_one ? fmt::format("{}, or a list of such", item)
                               : fmt::format("a list; each item: {}", item);
    }
    case Kind::group: {
      if (type.group->shorthand.empty()) return "a group of keys";
      std::vector<std::string> keys;
      for (const Field& member : type.group->fields)
        keys.push_back(member.key);
      return fmt::format("{} or a group of the keys {}",
                         allowed_text(*type.group->find(type.group->shorthand)),
                         fmt::join(keys, ", "));
    }
  }
  return "";
}

bool in_range(const Field& field, double value) {
  const bool low = field.minimum_excluded ? value > field.minimum : value >= field.minimum;
  const bool high = field.maximum_excluded ? value < field.maximum : value <= field.maximum;
  return low && high;
}

std::string quote_if_needed(const std::string& text) {
  static const std::vector<std::string> words = {
      "null", "Null", "NULL", "true", "false", "yes", "no", "on", "off"};
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '/';
  };
  const auto follows = [&](char c) {
    return plain(c) || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '+';
  };
  const bool starts_plain =
      !text.empty() &&
      (plain(text[0]) || (text[0] == '.' && text.size() > 1 && (text[1] == '/' || text[1] == '.')));
  if (starts_plain && std::all_of(text.begin(), text.end(), follows) &&
      std::find(words.begin(), words.end(), text) == words.end()) {
    return text;
  }
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      quoted += fmt::format("\\{}", c);
    else if (static_cast<unsigned char>(c) < 0x20)
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else
      quoted += c;
  }
  return quoted + "\"";
}

std::string value_text(const Field& field, const Type& type, const void* value) {
  void* p = const_cast<void*>(value);  // the type-erased accessors serve reading too
  switch (type.kind) {
    case Kind::boolean:
      return *static_cast<const bool*>(value) ? "true" : "false";
    case Kind::integer: {
      const std::int64_t number = *static_cast<const std::int64_t*>(value);
      return field.unit == Unit::bytes ? print_bytes(number) : fmt::format("{}", number);
    }
    case Kind::number:
      return fmt::format("{}", *static_cast<const double*>(value));
    case Kind::text:
      return quote_if_needed(*static_cast<const std::string*>(value));
    case Kind::choice: {
      const std::string word(type.choices[static_cast<std::size_t>(type.get_choice(value))]);
      // "1f1b" and "1-sqrt" start with a digit and are texts all the same; no quotes for the words
      // of a list of choices.
      return word;
    }
    case Kind::optional: {
      const void* content = type.content(p);
      return content ? value_text(field, *type.item, content) : "null";
    }
    case Kind::list: {
      std::vector<std::string> items;
      for (std::size_t i = 0; i < type.size(value); ++i)
        items.push_back(value_text(field, *type.item, type.at(p, i)));
      return fmt::format("[{}]", fmt::join(items, ", "));
    }
    case Kind::group:
      return type.group->shorthand.empty() ? "{…}" : group_text(*type.group, p);
  }
  return "";
}

std::string default_text(const Section& section, const Field& field) {
  if (field.is_required) return "none; required";
  if (!field.default_note.empty()) return field.default_note;
  if (field.type.kind == Kind::group) return "the defaults of its keys";
  return value_text(field, field.type, field.address(section.defaults.get()));
}

}  // namespace moesaic::config
