#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/json_text.h"

namespace moesaic {

/// A JSON document as read: members in the order of the text.
struct JsonValue {
  enum class Kind : std::uint8_t { null, boolean, integer, real, text, list, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;  ///< of a number that is no integer of 64 bits
  std::string text;
  std::vector<std::string> keys;  ///< of an object, one per item
  std::vector<JsonValue> items;   ///< of a list or an object
  std::vector<std::uint32_t>
      by_key;  ///< the items of an object with many, by their keys: lookups stay short

  bool is(Kind k) const noexcept { return kind == k; }
  /// A member of an object; null where there is none.
  const JsonValue* find(std::string_view key) const noexcept;
};

/// "null", "a string", "an object", … as messages say it.
const char* kind_name(JsonValue::Kind kind) noexcept;

/// A tree of what read_json() reads, with its errors.
JsonValue parse_json(std::string_view text,
                     const std::string& where,
                     const JsonLimits& limits = {});

/// A value and where it stands; every error names file and JSON path ("model.vocab", "added_tokens[3].id").
class JsonNode {
 public:
  JsonNode(const JsonValue& value, std::string file) : value_(&value), file_(std::move(file)) {}

  const JsonValue& value() const noexcept { return *value_; }
  bool is_null() const noexcept { return value_->kind == JsonValue::Kind::null; }
  const std::string& text() const;
  bool boolean() const;
  /// An integer of [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) const;
  const std::vector<JsonValue>& list() const;
  const JsonValue& object() const;
  JsonNode item(std::size_t index) const;
  /// A member that must be there, or may be missing (then null).
  JsonNode member(std::string_view key) const;
  JsonNode member_or_null(std::string_view key) const;
  bool boolean_or(std::string_view key, bool otherwise) const;
  /// Refuses any member that is not listed.
  void only(std::initializer_list<std::string_view> allowed) const;

  std::string where() const;
  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void wrong_kind(const char* wanted) const;

 private:
  JsonNode(const JsonValue& value, std::string file, std::string path)
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}
  const JsonValue* value_;
  std::string file_, path_;
};

}  // namespace moesaic
