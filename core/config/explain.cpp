#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/config/fields.h"
#include "core/config/on_resume.h"
#include "core/config/schema.h"
#include "core/config/suggest.h"

namespace moesaic::config {
namespace {

struct Found {
  std::string key;         ///< items of lists as `key[]`
  const Section* section;  ///< that the field belongs to
  const Field* field;
};

/// "train.phases[0].until" -> {"train", "phases", "until"}: which item of a list does not matter
/// here.
std::vector<std::string> parts_of(const std::string& key) {
  std::vector<std::string> parts(1);
  bool in_brackets = false;
  for (const char c : key) {
    if (c == '[') in_brackets = true;
    if (!in_brackets && c == '.')
      parts.emplace_back();
    else if (!in_brackets)
      parts.back() += c;
    if (c == ']') in_brackets = false;
  }
  return parts;
}

std::optional<Found> find(const std::string& key, std::string& why_not) {
  const Section* section = &root_section();
  const Field* field = nullptr;
  const Section* owner = section;
  std::string path;
  for (const std::string& part : parts_of(key)) {
    if (!section) {
      why_not = fmt::format("{} has no keys below it", path);
      return std::nullopt;
    }
    if (field && field->type.kind == Kind::list) path += "[]";
    owner = section;
    field = section->find(part);
    if (!field) {
      why_not = unknown_key_message(*section, path, part);
      return std::nullopt;
    }
    path += (path.empty() ? "" : ".") + part;
    section = field->type.section();
  }
  return Found{path, owner, field};
}

std::string key_table(const Section& section, const std::string& path) {
  std::size_t width = 0;
  for (const Field& field : section.fields)
    width = std::max(width, field.key.size());
  std::string text;
  for (const Field& field : section.fields)
    text += fmt::format("  {:<{}}  {}\n", field.key, width, field.doc);
  return text + fmt::format("\n'moesaic explain {}KEY' says more about a key.\n",
                            path.empty() ? "" : path + ".");
}

std::string example_of(const Found& found) {
  const Field& field = *found.field;
  if (!field.example_text.empty()) return field.example_text;
  const void* value = field.address(found.section->defaults.get());
  const Type& leaf = field.type.leaf();
  const bool list = field.type.kind == Kind::list;
  std::string example;
  switch (leaf.kind) {
    case Kind::boolean:
      example = "true";
      break;
    case Kind::choice:
      example = std::string(leaf.choices.back());
      break;
    case Kind::integer:
    case Kind::number: {
      const bool set = field.type.kind == leaf.kind && !field.is_required;
      const double low = std::max(1.0, std::min(field.minimum, 1.0));
      const double lowest = in_range(field, low)           ? low
                            : std::isfinite(field.minimum) ? field.minimum
                                                           : field.maximum - 1;
      example = set ? value_text(field, leaf, value) : fmt::format("{}", lowest);
      break;
    }
    default:
      example = "name";
      break;
  }
  return list ? "[" + example + "]" : example;
}

std::string explain_field(const Found& found) {
  const Field& field = *found.field;
  std::string text = fmt::format("{}\n  {}\n", found.key, field.doc);
  if (const Section* group = field.type.section()) {
    const std::string shape = field.type.kind == Kind::list       ? "A list; each item has the keys"
                              : field.type.kind == Kind::optional ? "May be absent. Keys"
                                                                  : "Keys";
    return text + fmt::format("\n{}:\n", shape) + key_table(*group, found.key);
  }
  text += fmt::format("\n  allowed: {}\n", allowed_text(field));
  text += fmt::format("  default: {}\n", default_text(*found.section, field));
  text += fmt::format("  example: {}={}\n", found.key, example_of(found));
  if (const std::string resume = resume_text(found.key); !resume.empty())
    text += fmt::format("  on resume: {}\n", resume);
  if (!field.other_names.empty())
    text += fmt::format("  known elsewhere as: {}\n", fmt::join(field.other_names, ", "));
  return text;
}

}  // namespace

std::string explain(const std::string& key) {
  if (key.empty()) return "Sections of a configuration file:\n" + key_table(root_section(), "");
  std::string why_not;
  if (const auto found = find(key, why_not)) return explain_field(*found);
  if (key.find('.') == std::string::npos) {
    const std::vector<std::string> full = keys_named(key);
    if (full.size() == 1) return explain_field(*find(full.front(), why_not));
    if (full.size() > 1)
      throw UsageError(
          fmt::format("{}: several keys have this name: {}", key, fmt::join(full, ", ")));
  }
  throw UsageError(fmt::format("{}: {}", key, why_not));
}

}  // namespace moesaic::config
