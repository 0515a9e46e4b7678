#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config/enums.h"

// The field list of a section: the one place that says which keys exist, what they mean, what they
// accept. Reading, the effective configuration, the JSON Schema, `explain` and the suggestions for
// misspelt keys all walk these lists. Included by source files of core/config only.
namespace moesaic::config {

struct Section;

enum class Kind { boolean, integer, number, text, choice, optional, list, group };
enum class Unit { none, bytes, minutes, seconds, path };

/// Shape of a value and, type-erased, the access to it. `void*` points at the C++ value of that
/// shape.
struct Type {
  Kind kind = Kind::text;
  std::vector<std::string_view> choices;  ///< choice: words in enumerator order
  const Section* group = nullptr;         ///< group: its fields
  std::shared_ptr<const Type> item;       ///< optional and list: what is inside

  int (*get_choice)(const void*) = nullptr;
  void (*set_choice)(void*, int) = nullptr;
  void* (*emplace)(void*) =
      nullptr;  ///< optional: makes the inner value (a default one), returns it
  void* (*content)(void*) = nullptr;          ///< optional: the inner value, or nullptr
  void (*reset)(void*) = nullptr;             ///< optional
  void* (*append)(void*) = nullptr;           ///< list: adds a default item, returns it
  void* (*at)(void*, std::size_t) = nullptr;  ///< list
  std::size_t (*size)(const void*) = nullptr;
  void (*clear)(void*) = nullptr;

  /// The shape under optional and list.
  const Type& leaf() const { return item ? item->leaf() : *this; }
  /// The group that keys below this one belong to, or nullptr.
  const Section* section() const { return leaf().group; }
};

/// One key. The setters return *this, so that a list reads as one statement per key.
struct Field {
  std::string key;
  std::string doc;
  Type type;
  std::function<void*(void*)> address;  ///< of the member, from the address of the section

  bool is_required = false;
  Unit unit = Unit::none;
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool minimum_excluded = false;
  bool maximum_excluded = false;
  bool accepts_null = false;  ///< `null` stands for an absent key
  bool accepts_one = false;   ///< list: a single item may stand without brackets
  bool is_printed = true;     ///< part of the effective configuration
  std::string example_text;
  std::string default_note;              ///< in words, where the default depends on other things
  std::vector<std::string> other_names;  ///< spellings of other model families
  /// Choices: words of earlier versions, still read, and what they stand for.
  std::vector<std::pair<std::string, std::string>> older_words;

  Field& required() { return is_required = true, *this; }
  Field& in(Unit u) { return unit = u, *this; }
  Field& at_least(double x) { return minimum = x, *this; }
  Field& above(double x) { return minimum = x, minimum_excluded = true, *this; }
  Field& at_most(double x) { return maximum = x, *this; }
  Field& below(double x) { return maximum = x, maximum_excluded = true, *this; }
  Field& between(double low, double high) { return at_least(low).at_most(high); }
  Field& one_or_list() { return accepts_one = true, *this; }
  Field& or_null() { return accepts_null = true, *this; }
  Field& not_printed() { return is_printed = false, *this; }
  Field& example(std::string text) { return example_text = std::move(text), *this; }
  Field& default_is(std::string text) { return default_note = std::move(text), *this; }
  Field& also(std::vector<std::string> names) { return other_names = std::move(names), *this; }
  Field& was(std::string older, std::string now) {
    return older_words.emplace_back(std::move(older), std::move(now)), *this;
  }
};

/// All keys of one struct, and an instance that holds the defaults.
struct Section {
  std::deque<Field> fields;
  std::shared_ptr<void> defaults;
  /// Not empty: a single value stands for a group with this key alone, and groups are printed on one line.
  std::string shorthand;

  const Field* find(std::string_view key) const;
};

template <class S>
const Section& section_of();

namespace detail {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsVector : std::false_type {};
template <class T>
struct IsVector<std::vector<T>> : std::true_type {};

template <class T>
Type type_of();

template <class T>
Type optional_type() {
  using Inner = typename T::value_type;
  Type type;
  type.kind = Kind::optional;
  type.item = std::make_shared<const Type>(type_of<Inner>());
  type.emplace = [](void* p) -> void* { return &static_cast<T*>(p)->emplace(); };
  type.content = [](void* p) -> void* {
    return *static_cast<T*>(p) ? &**static_cast<T*>(p) : nullptr;
  };
  type.reset = [](void* p) { static_cast<T*>(p)->reset(); };
  return type;
}

template <class T>
Type list_type() {
  using Inner = typename T::value_type;
  Type type;
  type.kind = Kind::list;
  type.item = std::make_shared<const Type>(type_of<Inner>());
  type.append = [](void* p) -> void* { return &static_cast<T*>(p)->emplace_back(); };
  type.at = [](void* p, std::size_t i) -> void* { return &(*static_cast<T*>(p))[i]; };
  type.size = [](const void* p) { return static_cast<const T*>(p)->size(); };
  type.clear = [](void* p) { static_cast<T*>(p)->clear(); };
  return type;
}

template <class T>
Type choice_type() {
  Type type;
  type.kind = Kind::choice;
  for (const std::string_view name : names_of(T{}))
    type.choices.push_back(name);
  type.get_choice = [](const void* p) { return static_cast<int>(*static_cast<const T*>(p)); };
  type.set_choice = [](void* p, int i) { *static_cast<T*>(p) = static_cast<T>(i); };
  return type;
}

template <class T>
Type type_of() {
  Type type;
  if constexpr (std::is_same_v<T, bool>)
    type.kind = Kind::boolean;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    type.kind = Kind::integer;
  else if constexpr (std::is_same_v<T, double>)
    type.kind = Kind::number;
  else if constexpr (std::is_same_v<T, std::string>)
    type.kind = Kind::text;
  else if constexpr (std::is_enum_v<T>)
    type = choice_type<T>();
  else if constexpr (IsOptional<T>::value)
    type = optional_type<T>();
  else if constexpr (IsVector<T>::value)
    type = list_type<T>();
  else {
    type.kind = Kind::group;
    type.group = &section_of<T>();
  }
  return type;
}

}  // namespace detail

/// Collects the fields of struct S: `f("key", &S::member, "What it is.").at_least(1);`
template <class S>
class Fields {
 public:
  explicit Fields(Section& section) : section_(section) {}

  template <class T>
  Field& operator()(std::string key, T S::*member, std::string doc) {
    Field& field = section_.fields.emplace_back();
    field.key = std::move(key);
    field.doc = std::move(doc);
    field.type = detail::type_of<T>();
    field.address = [member](void* section) -> void* {
      return &(static_cast<S*>(section)->*member);
    };
    return field;
  }

  /// A single value in place of the group is the value of this key.
  void shorthand(std::string key) { section_.shorthand = std::move(key); }

 private:
  Section& section_;
};

template <class S>
const Section& section_of() {
  static const Section section = [] {
    Section result;
    result.defaults = std::make_shared<S>();
    Fields<S> fields(result);
    S::describe(fields);
    return result;
  }();
  return section;
}

/// The sections of the file.
const Section& root_section();

/// Calls visit(full key, field) for every key, groups before their members; items of lists appear
/// as `key[]`.
void walk(const Section& section,
          const std::string& prefix,
          const std::function<void(const std::string&, const Field&)>& visit);

/// What a value must be, in words: "an integer, at least 1", "one of: silu, situ".
std::string allowed_text(const Field& field, const Type& type);
inline std::string allowed_text(const Field& field) {
  return allowed_text(field, field.type) + (field.accepts_null ? ", or null" : "");
}

/// Empty if `value` is inside the field's range.
bool in_range(const Field& field, double value);

/// A value as it stands in a YAML file, on one line; groups are not values.
std::string value_text(const Field& field, const Type& type, const void* value);

/// The default as value_text, or the note that replaces it.
std::string default_text(const Section& section, const Field& field);

/// A text as a YAML scalar, quoted where a plain one would be read as something else.
std::string quote_if_needed(const std::string& text);

}  // namespace moesaic::config
