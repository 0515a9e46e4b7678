#include "core/tokenizer/regex_syntax.h"

#include <array>
#include <cctype>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tokenizer {
namespace {

// The general categories: each code point is in exactly one two-letter one.
constexpr std::array<std::string_view, 7> kGroups{"L", "M", "N", "P", "S", "Z", "C"};
constexpr std::array<std::string_view, 30> kCategories{
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

template <class List>
bool holds(const List& list, std::string_view name) {
  for (const auto& item : list) {
    if (item == name) return true;
  }
  return false;
}

bool is_category(std::string_view name) {
  return holds(kGroups, name) || holds(kCategories, name);
}

// A bracketed set: what stands in it, translated, and for intersections the categories alone.
struct Set {
  bool negated = false;
  std::string items;
  std::vector<std::string> categories;
  bool only_categories = true;
};

class Translator {
 public:
  Translator(std::string_view pattern, RegexDialect dialect, const std::string& where)
      : in_(pattern), dialect_(dialect), where_(where) {}

  std::string run() {
    while (at_ < in_.size())
      element();
    if (!groups_.empty()) fail("a group is not closed");
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(
        fmt::format("{}: {} (byte {} of the pattern {})", where_, what, at_, std::string(in_)));
  }
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0';
  }
  bool starts(std::string_view text) const { return in_.substr(at_).starts_with(text); }
  bool rust() const { return dialect_ == RegexDialect::rust; }
  bool ignores_case() const { return !groups_.empty() && groups_.back(); }

  void element() {
    const char c = in_[at_];
    switch (c) {
      case '(':
        open_group();
        return;
      case ')':
        if (groups_.empty()) fail("')' without '('");
        groups_.pop_back();
        ++at_;
        out_ += ')';
        quantifier();
        return;
      case '|':
        ++at_;
        out_ += '|';
        return;
      case '[': {
        if (ignores_case()) fail("a set inside (?i:…) is not implemented");
        out_ += written(set());
        quantifier();
        return;
      }
      case '\\': {
        const std::string escape = translate_escape(nullptr);
        out_ += escape;
        quantifier();
        return;
      }
      case '^':
        if (!rust()) fail("'^' means the start of a line to Oniguruma; not implemented");
        ++at_;
        out_ += "\\A";
        return;
      case '$':
        if (!rust()) fail("'$' means the end of a line to Oniguruma; not implemented");
        ++at_;
        out_ += "\\z";
        return;
      case '*':
      case '+':
      case '?':
        fail(fmt::format("'{}' has nothing to repeat", c));
      case '{':
      case '}':
      case ']':
        fail(fmt::format("write a literal '{}' as '\\{}'", c, c));
      default:
        if (ignores_case() && static_cast<unsigned char>(c) >= 0x80)
          fail("a character outside ASCII inside (?i:…) is not implemented");
        literal();
        quantifier();
    }
  }

  // One character, of any number of bytes. '#' and spaces are plain: (?x) is refused.
  void literal() {
    do {
      out_ += in_[at_++];
    } while (at_ < in_.size() && (static_cast<unsigned char>(in_[at_]) & 0xC0) == 0x80);
  }

  void open_group() {
    for (const std::string_view form : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!starts(form)) continue;
      groups_.push_back(ignores_case() || form == "(?i:");
      at_ += form.size();
      out_ += form;
      return;
    }
    if (peek(1) == '?' || peek(1) == '*')
      fail("this kind of group is not implemented; (?: (?i: (?= (?! (?<= (?<! (?> are");
    groups_.push_back(ignores_case());
    ++at_;
    out_ += "(?:";  // what groups capture is never asked for
  }

  void quantifier() {
    const char c = peek();
    bool interval = false, exact = false;
    if (c == '*' || c == '+' || c == '?') {
      out_ += c;
      ++at_;
    } else if (c == '{') {
      interval = true;
      const std::size_t close = in_.find('}', at_);
      const std::string_view body =
          close == std::string_view::npos ? "" : in_.substr(at_ + 1, close - at_ - 1);
      exact = body.find(',') == std::string_view::npos;
      if (body.empty() || std::isdigit(static_cast<unsigned char>(body[0])) == 0 ||
          body.find_first_not_of("0123456789,") != std::string_view::npos)
        fail("an interval must be {n}, {n,} or {n,m}; write a literal '{' as '\\{'");
      out_ += in_.substr(at_, close + 1 - at_);
      at_ = close + 1;
    } else {
      return;
    }
    const char mode = peek();
    if (mode == '?' || mode == '+') {
      if (interval && !rust() && (mode == '+' || exact))
        fail(fmt::format("'}}{}' means something of its own to Oniguruma; not implemented", mode));
      out_ += mode;
      ++at_;
    }
    if (peek() == '*' || peek() == '+' || peek() == '?' || peek() == '{')
      fail("a quantifier after a quantifier");
  }

  // At '\\'. In a set (`set` given) the translation belongs between its brackets.
  std::string translate_escape(Set* set) {
    const char c = peek(1);
    if (c == '\0' && at_ + 1 >= in_.size()) fail("a backslash at the end");
    if (c == 'p' || c == 'P') return property(set);
    if (set != nullptr) set->only_categories = false;
    if (c == 'u') return code_point_u();
    if (c == 'x') return code_point_x();
    at_ += 2;
    if (c == 's') return "\\p{White_Space}";
    if (c == 'S') return "\\P{White_Space}";
    if (c == 'd') return "\\p{Nd}";
    if (c == 'D') return "\\P{Nd}";
    if (std::strchr("rntfv", c) != nullptr) return c == 'v' ? "\\x0b" : std::string{'\\', c};
    if (set == nullptr && (c == 'A' || c == 'z')) return std::string{'\\', c};
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && std::isalnum(byte) == 0) return std::string{'\\', c};
    at_ -= 2;
    fail(fmt::format("'\\{}' is not implemented", c));
  }

  std::string hexadecimal(std::string_view digits) const {
    if (digits.empty() || digits.size() > 6 ||
        digits.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos)
      fail("not a hexadecimal code point");
    return fmt::format("\\x{{{}}}", digits);
  }
  std::string code_point_u() {
    const std::string text = hexadecimal(in_.substr(std::min(at_ + 2, in_.size()), 4));
    at_ += 6;
    return text;
  }
  std::string code_point_x() {
    if (peek(2) != '{') {
      const std::string text = hexadecimal(in_.substr(std::min(at_ + 2, in_.size()), 2));
      at_ += 4;
      return text;
    }
    const std::size_t close = in_.find('}', at_);
    if (close == std::string_view::npos) fail("'\\x{' is not closed");
    const std::string text = hexadecimal(in_.substr(at_ + 3, close - at_ - 3));
    at_ = close + 1;
    return text;
  }

  std::string property(Set* set) {
    if (ignores_case()) fail("a property inside (?i:…) is not implemented");
    bool negated = peek(1) == 'P';
    std::string name;
    if (peek(2) == '{') {
      const std::size_t close = in_.find('}', at_);
      if (close == std::string_view::npos) fail("'\\p{' is not closed");
      name = in_.substr(at_ + 3, close - at_ - 3);
      if (name.starts_with('^')) {
        negated = !negated;
        name.erase(0, 1);
      }
      for (const char c : name) {
        if (std::isalpha(static_cast<unsigned char>(c)) == 0 && c != '_')
          fail(fmt::format("the property '{}' is not implemented", name));
      }
      if (name.empty()) fail("a property without a name");
      at_ = close + 1;
    } else {
      name = peek(2);
      if (!holds(kGroups, name)) fail(fmt::format("the property '{}' is not known", name));
      at_ += 3;
    }
    const bool category = is_category(name);
    if (set != nullptr) {
      if (category && !negated) set->categories.push_back(name);
      if (!category || negated) set->only_categories = false;
    }
    return fmt::format("\\{}{{{}{}}}", negated ? 'P' : 'p', category ? "" : "sc:", name);
  }

  // At '['.
  Set set() {
    Set s;
    ++at_;
    if (peek() == '^') {
      s.negated = true;
      ++at_;
    }
    if (peek() == ']') fail("an empty set; write a literal ']' as '\\]'");
    while (peek() != ']') {
      if (at_ >= in_.size()) fail("a set is not closed");
      if (starts("&&")) {
        at_ += 2;
        return intersection(s);
      }
      if (starts("--") || starts("~~"))
        fail("write a literal '-' or '~' in a set with a backslash");
      const char c = peek();
      if (c == '[')
        fail("a set inside a set is implemented after '&&' only; write a literal '[' as '\\['");
      if (c == '\\') {
        s.items += translate_escape(&s);
      } else {
        s.only_categories = false;
        s.items += c;
        ++at_;
      }
    }
    ++at_;
    return s;
  }

  // [A&&[^B]] with A a union of categories: all that is in no other category, and not in B.
  Set intersection(const Set& left) {
    if (peek() != '[') fail("'&&' is implemented before a negated set only");
    const Set right = set();
    if (peek() != ']') fail("more than one '&&' in a set is not implemented");
    ++at_;
    if (left.negated || !left.only_categories || left.categories.empty() || !right.negated)
      fail(
          "'&&' is implemented between general categories and a negated set only: "
          "[\\p{Lu}\\p{Lt}&&[^\\p{Han}]]");
    Set s;
    s.negated = true;
    s.only_categories = false;
    for (const std::string_view category : kCategories) {
      const bool in_left =
          holds(left.categories, category) || holds(left.categories, category.substr(0, 1));
      if (!in_left) s.items += fmt::format("\\p{{{}}}", category);
    }
    s.items += right.items;
    return s;
  }

  static std::string written(const Set& s) {
    return fmt::format("[{}{}]", s.negated ? "^" : "", s.items);
  }

  std::string_view in_;
  RegexDialect dialect_;
  const std::string& where_;
  std::size_t at_ = 0;
  std::string out_;
  std::vector<bool> groups_;  // open groups: does each ignore case?
};

}  // namespace

std::string to_pcre2(std::string_view pattern, RegexDialect dialect, const std::string& where) {
  return Translator(pattern, dialect, where).run();
}

std::string quote_for_pcre2(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80 && std::isalnum(byte) == 0) {
      out += fmt::format("\\x{{{:x}}}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace moesaic::tokenizer
