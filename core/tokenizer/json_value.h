#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::tokenizer {

/// A JSON document as read: members in the order of the text. Our own, so that limits, duplicate keys and paths in
/// messages are in one place.
struct JsonValue {
  enum class Kind : std::uint8_t { null, boolean, integer, real, text, list, object };
  Kind kind = Kind::null;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<std::string> keys;  ///< of an object, one per item
  std::vector<JsonValue> items;   ///< of a list or an object

  const JsonValue* find(std::string_view key) const noexcept;
};

constexpr std::size_t kMaxJsonBytes = std::size_t{256} << 20;
constexpr std::size_t kMaxJsonDepth = 64;

/// Throws InputError (file:offset) for text that is not JSON, invalid UTF-8, a key that occurs twice in an object, a
/// depth above kMaxJsonDepth, an integer outside 64 bits, or more than kMaxJsonBytes.
JsonValue parse_json(std::string_view text, const std::string& file);

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

}  // namespace moesaic::tokenizer
