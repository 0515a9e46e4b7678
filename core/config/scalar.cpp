#include "core/config/scalar.h"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

namespace moesaic::config {
namespace {

constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// A decimal as written: (-1)^negative * digits * 10^exponent.
struct Decimal {
  bool negative = false;
  std::string digits;  ///< integer and fraction digits, without point and underscores
  std::int64_t exponent = 0;
  std::string canonical;  ///< the text without underscores and '+', for from_chars
  bool has_point = false;
  bool has_exponent = false;
};

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

/// Why a text that looks like a number in another language is none here; empty = no special reason.
std::string known_trap(std::string_view text) {
  std::string word = lower(text);
  if (!word.empty() && (word[0] == '-' || word[0] == '+')) word.erase(0, 1);
  if (word == ".nan" || word == "nan" || word == ".inf" || word == "inf" || word == "infinity")
    return "must be finite";
  if (word.size() > 2 && word[0] == '0' && (word[1] == 'x' || word[1] == 'o' || word[1] == 'b'))
    return "write it in decimal";
  if (word.size() > 1 && word[0] == '0' && is_digit(word[1])) {
    const auto first = word.find_first_not_of('0');
    return fmt::format("leading zeros are not accepted (some readers take them as octal); write {}",
                       first == std::string::npos ? "0" : word.substr(first));
  }
  if (word.find(',') != std::string::npos)
    return "write thousands as 1_000 and fractions with a point";
  if (word.size() > 1 && word[0] == '.' && is_digit(word[1])) return fmt::format("write 0{}", word);
  return "";
}

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  /// sign? digits (. digits)? ([eE] sign? digits)? with single underscores between digits, up to
  /// the end of the text.
  bool scan(Decimal& out) {
    if (peek() == '-' || peek() == '+') {
      out.negative = take() == '-';
      if (out.negative) out.canonical += '-';
    }
    std::string whole;
    if (!digits(whole) || (whole.size() > 1 && whole[0] == '0')) return false;
    out.digits = whole;
    out.canonical += whole;
    if (peek() == '.') {
      take();
      std::string fraction;
      if (!digits(fraction)) return false;
      out.has_point = true;
      out.digits += fraction;
      out.exponent -= static_cast<std::int64_t>(fraction.size());
      out.canonical += "." + fraction;
    }
    return exponent(out) && at_ == text_.size();
  }

 private:
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char take() { return text_[at_++]; }
  bool digits(std::string& out) {
    while (is_digit(peek()) || (peek() == '_' && !out.empty() && at_ + 1 < text_.size() &&
                                is_digit(text_[at_ - 1]) && is_digit(text_[at_ + 1]))) {
      const char c = take();
      if (c != '_') out += c;
    }
    return !out.empty();
  }
  bool exponent(Decimal& out) {
    if (peek() != 'e' && peek() != 'E') return true;
    take();
    out.has_exponent = true;
    out.canonical += 'e';
    bool minus = false;
    if (peek() == '-' || peek() == '+') minus = take() == '-';
    if (minus) out.canonical += '-';
    std::string figures;
    if (!digits(figures)) return false;
    out.canonical += figures;
    std::int64_t value = 0;
    for (const char c : figures)
      value = value < 1'000'000 ? value * 10 + (c - '0') : value;  // beyond: out of range anyway
    out.exponent += minus ? -value : value;
    return true;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

/// digits * 10^exponent as an exact int64.
std::optional<std::int64_t> exact_integer(Decimal decimal) {
  std::string& digits = decimal.digits;
  while (digits.size() > 1 && digits.back() == '0') {
    digits.pop_back();
    ++decimal.exponent;
  }
  if (digits.find_first_not_of('0') == std::string::npos) return 0;
  if (decimal.exponent < 0 || decimal.exponent > 18) return std::nullopt;
  digits.append(static_cast<std::size_t>(decimal.exponent), '0');
  if (decimal.negative) digits.insert(digits.begin(), '-');
  const char* begin = digits.data();
  std::int64_t value = 0;
  // from_chars skips no sign or blank and reports overflow; leading zeros of "0.001e6" are harmless
  // to it.
  const auto [end, error] = std::from_chars(begin, begin + digits.size(), value);
  if (error != std::errc() || end != begin + digits.size()) return std::nullopt;
  return value;
}

bool is_fraction(Decimal decimal) {
  while (decimal.digits.size() > 1 && decimal.digits.back() == '0') {
    decimal.digits.pop_back();
    ++decimal.exponent;
  }
  return decimal.exponent < 0;
}

Parsed<std::int64_t> failed_integer(std::string error) {
  return {std::nullopt, std::move(error)};
}
Parsed<double> failed_number(std::string error) {
  return {std::nullopt, std::move(error)};
}

struct SizeUnit {
  std::string_view name;
  std::int64_t bytes;
};
constexpr std::array<SizeUnit, 9> kSizeUnits{{{"TiB", std::int64_t{1} << 40},
                                              {"GiB", std::int64_t{1} << 30},
                                              {"MiB", 1 << 20},
                                              {"KiB", 1 << 10},
                                              {"TB", 1'000'000'000'000},
                                              {"GB", 1'000'000'000},
                                              {"MB", 1'000'000},
                                              {"kB", 1'000},
                                              {"B", 1}}};

struct TimeUnit {
  std::string_view name;
  double seconds;
};
constexpr std::array<TimeUnit, 5> kTimeUnits{
    {{"ms", 1e-3}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}}};

bool ends_with_unit(std::string_view text, std::string_view unit) {
  return text.size() > unit.size() && text.ends_with(unit) &&
         !((text[text.size() - unit.size() - 1] | 0x20) >= 'a');
}

std::string_view without_trailing_blanks(std::string_view text) {
  while (!text.empty() && text.back() == ' ')
    text.remove_suffix(1);
  return text;
}

}  // namespace

Parsed<std::int64_t> parse_integer(std::string_view text) {
  Decimal decimal;
  if (!Scanner(text).scan(decimal)) return failed_integer(known_trap(text));
  const std::optional<std::int64_t> value = exact_integer(decimal);
  if (!value)
    return failed_integer(is_fraction(decimal) ? "not a whole number"
                                               : "too large for a 64-bit integer");
  if (decimal.has_point && !decimal.has_exponent)
    return failed_integer(fmt::format("write {}", *value));
  return {value, ""};
}

Parsed<double> parse_number(std::string_view text) {
  Decimal decimal;
  if (!Scanner(text).scan(decimal)) return failed_number(known_trap(text));
  double value = 0;
  const char* begin = decimal.canonical.data();
  const auto [end, error] = std::from_chars(begin, begin + decimal.canonical.size(), value);
  if (error == std::errc::result_out_of_range) {
    return failed_number("beyond the range of f64 (it would become 0 or infinity)");
  }
  if (error != std::errc() || end != begin + decimal.canonical.size() || !std::isfinite(value)) {
    return failed_number("not a number");
  }
  return {value, ""};
}

Parsed<bool> parse_boolean(std::string_view text) {
  if (text == "true") return {true, ""};
  if (text == "false") return {false, ""};
  const std::string word = lower(text);
  for (const char* yes : {"yes", "on", "y", "1", "true"}) {
    if (word == yes) return {std::nullopt, "write true"};
  }
  for (const char* no : {"no", "off", "n", "0", "false"}) {
    if (word == no) return {std::nullopt, "write false"};
  }
  return {std::nullopt, ""};
}

Parsed<std::int64_t> parse_bytes(std::string_view text) {
  if (text == "0") return {0, ""};
  for (const SizeUnit& unit : kSizeUnits) {
    if (!ends_with_unit(text, unit.name)) continue;
    Decimal decimal;
    const std::string_view amount =
        without_trailing_blanks(text.substr(0, text.size() - unit.name.size()));
    if (!Scanner(amount).scan(decimal)) return failed_integer(known_trap(amount));
    const Parsed<double> number = parse_number(amount);
    if (!number.value) return failed_integer(number.error);
    const double bytes = *number.value * static_cast<double>(unit.bytes);
    if (bytes >= 9.0e18 || bytes < 0) return failed_integer("out of range");
    if (const auto count = exact_integer(decimal)) return {*count * unit.bytes, ""};
    if (bytes != std::floor(bytes)) return failed_integer("not a whole number of bytes");
    return {static_cast<std::int64_t>(bytes), ""};
  }
  if (const auto number = parse_number(text).value)
    return failed_integer(*number < 0 ? "is negative"
                                      : fmt::format("has no unit; write for example {}GiB", text));
  return failed_integer("");
}

Parsed<double> parse_duration(std::string_view text, double unit_seconds) {
  for (const TimeUnit& unit : kTimeUnits) {
    if (!ends_with_unit(text, unit.name)) continue;
    Parsed<double> number =
        parse_number(without_trailing_blanks(text.substr(0, text.size() - unit.name.size())));
    if (number.value) number.value = *number.value * unit.seconds / unit_seconds;
    return number;
  }
  return parse_number(text);
}

std::string print_bytes(std::int64_t bytes) {
  if (bytes == 0) return "0";
  std::string shortest;
  for (const SizeUnit& unit : kSizeUnits) {
    if (bytes % unit.bytes != 0) continue;
    const std::string text = fmt::format("{}{}", bytes / unit.bytes, unit.name);
    if (shortest.empty() || text.size() < shortest.size()) shortest = text;
  }
  return shortest;
}

}  // namespace moesaic::config
