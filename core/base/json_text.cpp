#include "core/base/json_text.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace moesaic {
namespace {

constexpr std::size_t kShownKey = 60;  // bytes of a key in a message

// Passes a text to nlohmann's parser, which has no places in its events, and notes how far it got.
class Cursor {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Cursor(const char* at, const char** reached) : at_(at), reached_(reached) {}
  reference operator*() const { return *at_; }
  Cursor& operator++() {
    *reached_ = ++at_;
    return *this;
  }
  Cursor operator++(int) {
    const Cursor before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const Cursor& a, const Cursor& b) { return a.at_ == b.at_; }
  friend bool operator!=(const Cursor& a, const Cursor& b) { return a.at_ != b.at_; }

 private:
  const char* at_;
  const char** reached_;
};

// The keys of an object so far. Most objects have few: comparing beats hashing there.
class Keys {
 public:
  bool insert(const std::string& key) {
    if (many_.empty()) {
      if (std::find(few_.begin(), few_.end(), key) != few_.end()) return false;
      few_.push_back(key);
      if (few_.size() <= kFew) return true;
      many_.insert(few_.begin(), few_.end());
      few_.clear();
      return true;
    }
    return many_.insert(key).second;
  }

 private:
  static constexpr std::size_t kFew = 16;
  std::vector<std::string> few_;
  std::unordered_set<std::string> many_;
};

class Sax final : public nlohmann::json_sax<nlohmann::json> {
 public:
  Sax(std::string_view text, const std::string& where, const JsonLimits& limits, JsonEvents& events)
      : text_(text), where_(where), limits_(limits), events_(events), reached_(text.data()) {}

  void run() {
    if (text_.size() > limits_.max_bytes)
      throw InputError(fmt::format(
          "{}: {} bytes; at most {} are read as JSON", where_, text_.size(), limits_.max_bytes));
    const auto zero = text_.find('\0');
    if (zero != std::string_view::npos) fail(zero, "not valid JSON: a zero byte");
    nlohmann::json::sax_parse(
        Cursor(text_.data(), &reached_), Cursor(text_.data() + text_.size(), &reached_), this);
  }

  bool null() override {
    events_.null();
    return true;
  }
  bool boolean(bool value) override {
    events_.boolean(value);
    return true;
  }
  bool number_integer(number_integer_t value) override {
    events_.integer(value);
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
      return number_float(static_cast<double>(value), std::to_string(value));
    return number_integer(static_cast<std::int64_t>(value));
  }
  bool number_float(number_float_t value, const string_t& digits) override {
    events_.real(value, digits);
    return true;
  }
  bool string(string_t& value) override {
    events_.text(value);
    return true;
  }
  bool binary(binary_t&) override { return false; }  // JSON text has none
  bool start_object(std::size_t) override {
    open();
    events_.open_object();
    return true;
  }
  bool start_array(std::size_t) override {
    open();
    events_.open_list();
    return true;
  }
  bool key(string_t& name) override {
    if (!open_.back().insert(name))
      fail(start_of_key(),
           fmt::format("the key \"{}\" is given twice in one object; keep one of them",
                       shown(name)));
    events_.key(name);
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    events_.close_object();
    return true;
  }
  bool end_array() override {
    open_.pop_back();
    events_.close_list();
    return true;
  }
  bool parse_error(std::size_t position,
                   const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The message repeats the place, as nlohmann counts, before the cause.
    const std::string_view message(error.what());
    const auto cause = message.find("syntax error");
    const std::size_t at = std::min(position > 0 ? position - 1 : 0, text_.size());
    fail(at,
         fmt::format("not valid JSON: {}",
                     message.substr(cause == std::string_view::npos ? 0 : cause, kMostOfCause)));
  }

 private:
  static constexpr std::size_t kMostOfCause =
      300;  // it quotes what was read last, which may be long

  [[noreturn]] void fail(std::size_t offset, const std::string& what) const {
    throw InputError(fmt::format("{}:{}: {}", where_, limits_.first_byte + offset, what));
  }
  std::size_t reached() const { return static_cast<std::size_t>(reached_ - text_.data()); }
  void open() {
    if (open_.size() == limits_.max_depth)
      fail(reached() - 1, fmt::format("nested more than {} deep", limits_.max_depth));
    open_.emplace_back();
  }
  // The parser stands behind the closing quote; quotes inside a key follow an odd number of backslashes.
  std::size_t start_of_key() const {
    for (std::size_t at = reached() - 1; at > 0;) {
      --at;
      if (text_[at] != '"') continue;
      std::size_t slashes = 0;
      while (slashes < at && text_[at - 1 - slashes] == '\\')
        ++slashes;
      if (slashes % 2 == 0) return at;
      at -= slashes;
    }
    return 0;
  }
  static std::string shown(const std::string& key) {
    if (key.size() <= kShownKey) return key;
    std::size_t cut = kShownKey;
    while (cut > 0 && (static_cast<unsigned char>(key[cut]) & 0xC0) == 0x80)
      --cut;
    return key.substr(0, cut) + "…";
  }

  std::string_view text_;
  const std::string& where_;
  const JsonLimits& limits_;
  JsonEvents& events_;
  const char* reached_;
  std::vector<Keys> open_;  // of a list: no keys
};

}  // namespace

void read_json(std::string_view text,
               const std::string& where,
               const JsonLimits& limits,
               JsonEvents& events) {
  Sax(text, where, limits, events).run();
}

void check_json(std::string_view text, const std::string& where, const JsonLimits& limits) {
  JsonEvents ignore;
  read_json(text, where, limits, ignore);
}

}  // namespace moesaic
