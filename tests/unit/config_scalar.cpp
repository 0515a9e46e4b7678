#include <limits>

#include "core/config/scalar.h"
#include "tests/support/catch.h"

using namespace moesaic::config;

namespace {

constexpr double kMinute = 60;

}  // namespace

TEST_CASE("config: integers") {
  CHECK(parse_integer("0").value == 0);
  CHECK(parse_integer("-12").value == -12);
  CHECK(parse_integer("+12").value == 12);
  CHECK(parse_integer("1_000_000").value == 1'000'000);
  CHECK(parse_integer("1e9").value == 1'000'000'000);
  CHECK(parse_integer("2.5e3").value == 2500);
  CHECK(parse_integer("1200e-2").value == 12);
  CHECK(parse_integer("9223372036854775807").value == std::numeric_limits<std::int64_t>::max());
  CHECK(parse_integer("-9223372036854775808").value == std::numeric_limits<std::int64_t>::min());
}

TEST_CASE("config: what is no integer, and what to write") {
  CHECK(parse_integer("010").error ==
        "leading zeros are not accepted (some readers take them as octal); write 10");
  CHECK(parse_integer("00").error ==
        "leading zeros are not accepted (some readers take them as octal); write 0");
  CHECK(parse_integer("0x10").error == "write it in decimal");
  CHECK(parse_integer("0o7").error == "write it in decimal");
  CHECK(parse_integer("3.0").error == "write 3");
  CHECK(parse_integer("3.5").error == "not a whole number");
  CHECK(parse_integer("1e-3").error == "not a whole number");
  CHECK(parse_integer("9223372036854775808").error == "too large for a 64-bit integer");
  CHECK(parse_integer("1e19").error == "too large for a 64-bit integer");
  CHECK(parse_integer("1e999999999999999999999").error == "too large for a 64-bit integer");
  CHECK(parse_integer(".nan").error == "must be finite");
  CHECK(parse_integer("1,000").error == "write thousands as 1_000 and fractions with a point");
  for (const char* text :
       {"", "-", "abc", "1 2", "12x", "1_", "_1", "1__0", "e5", "1e", "1e+", "--1", "１"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_integer(text).value);
  }
}

TEST_CASE("config: numbers") {
  CHECK(parse_number("3e-4").value == 3e-4);
  CHECK(parse_number("1").value == 1.0);
  CHECK(parse_number("-2.5").value == -2.5);
  CHECK(parse_number("1_000.5").value == 1000.5);
  CHECK(parse_number("2.446").value == 2.446);
  CHECK(parse_number("0e-400").value == 0.0);
  CHECK(parse_number("1e-400").error == "beyond the range of f64 (it would become 0 or infinity)");
  CHECK(parse_number("1e400").error == "beyond the range of f64 (it would become 0 or infinity)");
  CHECK(parse_number(".5").error == "write 0.5");
  for (const char* text : {".nan", ".NaN", "nan", ".inf", "-.inf", "+.Inf", "infinity"}) {
    CAPTURE(text);
    CHECK(parse_number(text).error == "must be finite");
  }
  for (const char* text : {"", "1.", "0x1p3", "010", "1e5.5", "1.2.3", "- 1"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_number(text).value);
  }
}

TEST_CASE("config: booleans") {
  CHECK(parse_boolean("true").value == true);
  CHECK(parse_boolean("false").value == false);
  for (const char* text : {"yes", "on", "y", "1", "True", "TRUE"})
    CHECK(parse_boolean(text).error == "write true");
  for (const char* text : {"no", "off", "n", "0", "False"})
    CHECK(parse_boolean(text).error == "write false");
  CHECK_FALSE(parse_boolean("maybe").value);
}

TEST_CASE("config: sizes") {
  CHECK(parse_bytes("0").value == 0);
  CHECK(parse_bytes("24GiB").value == std::int64_t{24} << 30);
  CHECK(parse_bytes("512 MiB").value == 512 << 20);
  CHECK(parse_bytes("1.5GB").value == 1'500'000'000);
  CHECK(parse_bytes("0.5KiB").value == 512);
  CHECK(parse_bytes("7B").value == 7);
  CHECK(parse_bytes("24").error == "has no unit; write for example 24GiB");
  CHECK(parse_bytes("0.3B").error == "not a whole number of bytes");
  CHECK(parse_bytes("9e9GiB").error == "out of range");
  for (const char* text : {"", "GiB", "24gib", "24XGiB", "010GiB", "-1GiB"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_bytes(text).value);
  }
  for (const char* text : {"24GiB", "3MiB", "1KiB", "5B", "0", "7TB"})
    CHECK(print_bytes(*parse_bytes(text).value) == text);
}

TEST_CASE("config: times convert to the unit of the key") {
  CHECK(parse_duration("30", kMinute).value == 30.0);
  CHECK(parse_duration("30m", kMinute).value == 30.0);
  CHECK(parse_duration("90s", kMinute).value == 1.5);
  CHECK(parse_duration("2h", kMinute).value == 120.0);
  CHECK(parse_duration("1d", 1).value == 86400.0);
  CHECK(parse_duration("500ms", 1).value == 0.5);
  for (const char* text : {"", "m", "3w", "1e400s", "nan"}) {
    CAPTURE(text);
    CHECK_FALSE(parse_duration(text, 1).value);
  }
}
