#include "core/data/json_line.h"

#include <optional>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/json_text.h"

namespace moesaic::data {
namespace {

constexpr JsonLimits kLimits{.max_bytes = SIZE_MAX, .max_depth = 64, .first_byte = 1};
constexpr std::size_t kNamedKeys = 12, kNamedBytes = 60;  // in a message

// Takes one member of the outermost object and lets the rest pass.
class MemberFinder final : public JsonEvents {
 public:
  MemberFinder(const std::string& key, const std::string& where) : key_(key), where_(where) {}
  std::string take() {
    if (!found_)
      fail(fmt::format("has no member \"{}\"; there are:{} (--json-key)",
                       key_,
                       keys_.empty() ? " none" : keys_));
    return std::move(*found_);
  }

  void null() override { other("null"); }
  void boolean(bool) override { other("a boolean"); }
  void integer(std::int64_t) override { other("a number"); }
  void real(double, const std::string&) override { other("a number"); }
  void text(std::string& value) override {
    if (!wanted()) return other("a string");
    found_ = std::move(value);
  }
  void key(std::string& name) override {
    if (depth_ != 1) return;
    is_key_ = name == key_;
    if (++num_keys_ <= kNamedKeys) keys_ += " " + name.substr(0, kNamedBytes);
    if (num_keys_ == kNamedKeys + 1) keys_ += " …";
  }
  void open_object() override {
    if (depth_ > 0) other("an object");
    ++depth_;
  }
  void close_object() override { --depth_; }
  void open_list() override {
    other("a list");
    ++depth_;
  }
  void close_list() override { --depth_; }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("{}: {}", where_, what));
  }
  bool wanted() const { return depth_ == 1 && is_key_; }
  void other(const char* kind) const {
    if (depth_ == 0) fail(fmt::format("is {}, must be an object", kind));
    if (wanted()) fail(fmt::format("\"{}\" is {}, must be a string", key_, kind));
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
  MemberFinder finder(key, where);
  read_json(line, where, kLimits, finder);
  return finder.take();
}

}  // namespace moesaic::data
