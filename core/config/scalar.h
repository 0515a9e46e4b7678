#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moesaic::config {

/// A value, or the reason why the text is none ("...; write 10").
template <class T>
struct Parsed {
  std::optional<T> value;
  std::string error;
};

/// Decimal integer in int64: `12`, `-3`, `1_000_000`, exact exponent forms (`1e9`, `2.5e3`).
/// Refused: leading zeros, hexadecimal and octal, fractions, `3.0`, overflow.
Parsed<std::int64_t> parse_integer(std::string_view text);

/// Finite decimal number in f64: `3`, `0.5`, `1_000`, `3e-4`. Refused: `nan`, `inf`, leading zeros,
/// and values that f64 turns into 0 or infinity.
Parsed<double> parse_number(std::string_view text);

/// `true` or `false`, nothing else.
Parsed<bool> parse_boolean(std::string_view text);

/// Bytes with a unit (`24GiB`, `512MiB`, `1.5GB`) or `0`. KiB, MiB, GiB, TiB count in 1024, kB, MB,
/// GB, TB in 1000.
Parsed<std::int64_t> parse_bytes(std::string_view text);

/// A time in units of `unit_seconds`: a plain number is taken in that unit; `500ms`, `90s`, `30m`,
/// `1.5h`, `2d` convert.
Parsed<double> parse_duration(std::string_view text, double unit_seconds);

/// Inverse of parse_bytes: the shortest exact text.
std::string print_bytes(std::int64_t bytes);

}  // namespace moesaic::config
