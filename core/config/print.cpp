#include <cstdint>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/config/fields.h"
#include "core/config/load.h"

namespace moesaic::config {
namespace {

class Printer {
 public:
  explicit Printer(const LoadedConfig& loaded) : loaded_(loaded) {}

  void section(const Section& section, const std::string& path, void* values, int indent) {
    for (const Field& field : section.fields) {
      if (!field.is_printed) continue;
      const std::string full = path.empty() ? field.key : path + "." + field.key;
      entry(field, full, field.address(values), indent, path.empty());
    }
  }
  std::string take() { return std::move(text_); }

 private:
  void entry(const Field& field, const std::string& full, void* value, int indent, bool top) {
    const Type* type = &field.type;
    if (type->kind == Kind::optional && type->content(value)) {
      value = type->content(value);
      type = type->item.get();
    }
    if (type->kind == Kind::group) {
      text_ +=
          fmt::format("{}{:>{}}{}:\n", top && !text_.empty() ? "\n" : "", "", indent, field.key);
      section(*type->group, full, value, indent + 2);
    } else if (type->kind == Kind::list && type->section() && type->section()->shorthand.empty() &&
               type->size(value) > 0) {
      line(indent, field.key + ":", full);
      groups(*type, full, value, indent + 2);
    } else {
      line(indent, field.key + ": " + value_text(field, *type, value), full);
    }
  }
  void groups(const Type& type, const std::string& full, void* list, int indent) {
    for (std::size_t i = 0; i < type.size(list); ++i) {
      const std::size_t start = text_.size();
      section(*type.section(), fmt::format("{}[{}]", full, i), type.at(list, i), indent + 2);
      text_[start + static_cast<std::size_t>(indent)] =
          '-';  // "- " takes the place of the first key's indentation
    }
  }
  void line(int indent, const std::string& content, const std::string& full) {
    std::string origin = to_string(origin_of(full));
    for (char& c : origin) {
      if (static_cast<unsigned char>(c) < 0x20) c = '?';
    }
    // What follows from other keys is shown, but not set again when the text is loaded.
    const bool derived = loaded_.derived.count(full) != 0;
    text_ += fmt::format("{}  # {}\n",
                         fmt::format("{:>{}}{}{}", "", indent, derived ? "# " : "", content),
                         derived ? "follows from other keys" : origin);
  }
  /// A list of which an argument set a single item names that argument.
  Origin origin_of(const std::string& full) const {
    for (auto it = loaded_.origins.lower_bound(full + "[");
         it != loaded_.origins.end() && it->first.starts_with(full + "[");
         ++it) {
      if (it->second.source == Origin::Source::command_line) return it->second;
    }
    return loaded_.origin(full);
  }

  const LoadedConfig& loaded_;
  std::string text_;
};

}  // namespace

std::string effective_yaml(const LoadedConfig& loaded) {
  Printer printer(loaded);
  Config copy = loaded.config;  // the type-erased accessors are not const
  printer.section(root_section(), "", &copy, 0);
  return printer.take();
}

}  // namespace moesaic::config
