#include "core/tokenizer/json_value.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::tokenizer {
namespace {

using Kind = JsonValue::Kind;

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return "a boolean";
    case Kind::integer:
      return "an integer";
    case Kind::real:
      return "a number";
    case Kind::text:
      return "a string";
    case Kind::list:
      return "a list";
    case Kind::object:
      return "an object";
  }
  return "";
}

// Builds the tree from nlohmann's events; the parser itself does not recurse.
class Builder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(const std::string& file) : file_(file) {}
  JsonValue take() { return std::move(root_); }

  bool null() override { return put({}) != nullptr; }
  bool boolean(bool value) override {
    put({.kind = Kind::boolean, .boolean = value});
    return true;
  }
  bool number_integer(number_integer_t value) override {
    put({.kind = Kind::integer, .integer = value});
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
      throw InputError(fmt::format("{}: the integer {} is beyond 64 bits", file_, value));
    return number_integer(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t&) override {
    put({.kind = Kind::real, .real = value});
    return true;
  }
  bool string(string_t& value) override {
    put({.kind = Kind::text, .text = std::move(value)});
    return true;
  }
  bool binary(binary_t&) override { return false; }  // JSON text has none
  bool start_object(std::size_t) override { return open(Kind::object); }
  bool start_array(std::size_t) override { return open(Kind::list); }
  bool key(string_t& value) override {
    stack_.back()->keys.push_back(std::move(value));
    return true;
  }
  bool end_object() override {
    std::unordered_set<std::string_view> seen;
    for (const std::string& key : stack_.back()->keys) {
      if (!seen.insert(key).second)
        throw InputError(fmt::format(
            "{}: the key \"{}\" occurs twice in one object; keep one of them", file_, key));
    }
    stack_.pop_back();
    return true;
  }
  bool end_array() override {
    stack_.pop_back();
    return true;
  }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception& error) override {
    throw InputError(fmt::format("{}:{}: not valid JSON: {}", file_, position, error.what()));
  }

 private:
  JsonValue* put(JsonValue value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    auto& items = stack_.back()->items;
    items.push_back(std::move(value));
    return &items.back();  // stays valid while it is open: only its own items grow meanwhile
  }
  bool open(Kind kind) {
    if (stack_.size() == kMaxJsonDepth)
      throw InputError(fmt::format("{}: nested more than {} deep", file_, kMaxJsonDepth));
    stack_.push_back(put({.kind = kind}));
    return true;
  }
  const std::string& file_;
  JsonValue root_;
  std::vector<JsonValue*> stack_;
};

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == key) return &items[i];
  }
  return nullptr;
}

JsonValue parse_json(std::string_view text, const std::string& file) {
  if (text.size() > kMaxJsonBytes)
    throw InputError(
        fmt::format("{}: {} bytes; at most {} are read as JSON", file, text.size(), kMaxJsonBytes));
  if (const auto at = zero_byte_in(text))
    throw InputError(fmt::format("{}:{}: not valid JSON: a zero byte", file, *at));
  Builder builder(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string JsonNode::where() const {
  return path_.empty() ? file_ : file_ + ": " + path_;
}
void JsonNode::fail(const std::string& what) const {
  throw InputError(where() + ": " + what);
}
void JsonNode::wrong_kind(const char* wanted) const {
  fail(fmt::format("is {}, must be {}", kind_name(value_->kind), wanted));
}

const std::string& JsonNode::text() const {
  if (value_->kind != Kind::text) wrong_kind("a string");
  return value_->text;
}
bool JsonNode::boolean() const {
  if (value_->kind != Kind::boolean) wrong_kind("true or false");
  return value_->boolean;
}
std::int64_t JsonNode::integer(std::int64_t low, std::int64_t high) const {
  if (value_->kind != Kind::integer) wrong_kind("an integer");
  if (value_->integer < low || value_->integer > high)
    fail(fmt::format("is {}, must be {} to {}", value_->integer, low, high));
  return value_->integer;
}
const std::vector<JsonValue>& JsonNode::list() const {
  if (value_->kind != Kind::list) wrong_kind("a list");
  return value_->items;
}
const JsonValue& JsonNode::object() const {
  if (value_->kind != Kind::object) wrong_kind("an object");
  return *value_;
}
JsonNode JsonNode::item(std::size_t index) const {
  return {list()[index], file_, fmt::format("{}[{}]", path_, index)};
}
JsonNode JsonNode::member(std::string_view key) const {
  const JsonValue* found = object().find(key);
  if (found == nullptr) fail(fmt::format("has no member \"{}\"", key));
  return {*found, file_, path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key)};
}
JsonNode JsonNode::member_or_null(std::string_view key) const {
  static const JsonValue null;
  if (object().find(key) != nullptr) return member(key);
  return {null, file_, path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key)};
}
bool JsonNode::boolean_or(std::string_view key, bool otherwise) const {
  const JsonNode node = member_or_null(key);
  return node.is_null() ? otherwise : node.boolean();
}
void JsonNode::only(std::initializer_list<std::string_view> allowed) const {
  for (const std::string& key : object().keys) {
    if (std::find(allowed.begin(), allowed.end(), key) == allowed.end())
      member(key).fail(
          fmt::format("this member is not known here; known are {}", fmt::join(allowed, ", ")));
  }
}

}  // namespace moesaic::tokenizer
