#include "core/data/json_line.h"

#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::data {
namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kNamedKeys = 12;  // in a message

// Takes one member of the outermost object and lets the rest pass.
class MemberFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  MemberFinder(const std::string& key, const std::string& where) : key_(key), where_(where) {}
  std::string take() {
    if (!found_)
      fail(fmt::format("has no member \"{}\"; there are:{} (--json-key)",
                       key_,
                       keys_.empty() ? " none" : keys_));
    return std::move(*found_);
  }

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("a boolean"); }
  bool number_integer(number_integer_t) override { return other("a number"); }
  bool number_unsigned(number_unsigned_t) override { return other("a number"); }
  bool number_float(number_float_t, const string_t&) override { return other("a number"); }
  bool binary(binary_t&) override { return false; }  // JSON text has none
  bool string(string_t& value) override {
    if (!wanted()) return other("a string");
    found_ = std::move(value);
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ > 0) other("an object");
    return enter();
  }
  bool start_array(std::size_t) override {
    other("a list");
    return enter();
  }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    if (depth_ != 1) return true;
    is_key_ = name == key_;
    if (is_key_ && found_) fail(fmt::format("holds \"{}\" twice", key_));
    if (++num_keys_ <= kNamedKeys) keys_ += " " + name;
    if (num_keys_ == kNamedKeys + 1) keys_ += " …";
    return true;
  }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception& error) override {
    const std::string_view text(
        error.what());  // repeats the place, as it sees it, before the cause
    const auto cause = text.find("syntax error");
    fail(fmt::format("column {}: not valid JSON: {}",
                     position,
                     text.substr(cause == std::string_view::npos ? 0 : cause)));
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }
  bool wanted() const { return depth_ == 1 && is_key_; }
  bool other(const char* kind) {
    if (depth_ == 0) fail(fmt::format("is {}, must be an object", kind));
    if (wanted()) fail(fmt::format("\"{}\" is {}, must be a string", key_, kind));
    return true;
  }
  bool enter() {
    if (++depth_ > kMaxDepth) fail(fmt::format("nested more than {} deep", kMaxDepth));
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }

  const std::string& key_;
  const std::string& where_;
  int depth_ = 0;
  bool is_key_ = false;
  std::optional<std::string> found_;
  std::size_t num_keys_ = 0;
  std::string keys_;
};

}  // namespace

std::string text_of_json_line(std::string_view line,
                              const std::string& key,
                              const std::string& where) {
  if (const auto at = zero_byte_in(line))
    throw InputError(fmt::format("{}: column {}: not valid JSON: a zero byte", where, *at + 1));
  MemberFinder finder(key, where);
  nlohmann::json::sax_parse(line.begin(), line.end(), &finder);
  return finder.take();
}

}  // namespace moesaic::data
