#include "core/base/json_value.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

using Kind = JsonValue::Kind;

constexpr std::size_t kFew = 16;  // members that are looked through one by one

class Builder final : public JsonEvents {
 public:
  JsonValue take() { return std::move(root_); }

  void null() override { put({}); }
  void boolean(bool value) override { put({.kind = Kind::boolean, .boolean = value}); }
  void integer(std::int64_t value) override { put({.kind = Kind::integer, .integer = value}); }
  void real(double value, const std::string&) override { put({.kind = Kind::real, .real = value}); }
  void text(std::string& value) override { put({.kind = Kind::text, .text = std::move(value)}); }
  void key(std::string& value) override { stack_.back()->keys.push_back(std::move(value)); }
  void open_object() override { open(Kind::object); }
  void open_list() override { open(Kind::list); }
  void close_list() override { stack_.pop_back(); }
  void close_object() override {
    JsonValue& object = *stack_.back();
    if (object.keys.size() > kFew) {
      object.by_key.resize(object.keys.size());
      std::iota(object.by_key.begin(), object.by_key.end(), 0U);
      std::sort(object.by_key.begin(), object.by_key.end(), [&](auto a, auto b) {
        return object.keys[a] < object.keys[b];
      });
    }
    stack_.pop_back();
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
  void open(Kind kind) { stack_.push_back(put({.kind = kind})); }

  JsonValue root_;
  std::vector<JsonValue*> stack_;
};

}  // namespace

const char* kind_name(Kind kind) noexcept {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return "a boolean";
    case Kind::integer:
      return "an integer";
    case Kind::real:
      return "a number that is no integer of 64 bits";
    case Kind::text:
      return "a string";
    case Kind::list:
      return "a list";
    case Kind::object:
      return "an object";
  }
  return "";
}

const JsonValue* JsonValue::find(std::string_view key) const noexcept {
  if (by_key.empty()) {
    const auto found = std::find(keys.begin(), keys.end(), key);
    return found == keys.end() ? nullptr : &items[static_cast<std::size_t>(found - keys.begin())];
  }
  const auto found =
      std::lower_bound(by_key.begin(), by_key.end(), key, [this](auto i, std::string_view wanted) {
        return keys[i] < wanted;
      });
  return found == by_key.end() || keys[*found] != key ? nullptr : &items[*found];
}

JsonValue parse_json(std::string_view text, const std::string& where, const JsonLimits& limits) {
  Builder builder;
  read_json(text, where, limits, builder);
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

}  // namespace moesaic
