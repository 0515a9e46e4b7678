#pragma once
// What the fuzz targets share. A target is a function of arbitrary bytes that returns when the product refuses them with one of the
// errors that a user may see, or accepts them and keeps its promises. Anything else ends the process.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace moesaic::fuzz {

struct Target {
  const char* name;
  void (*run)(std::string_view input);
};

/// All targets of this executable: one in a libFuzzer build, all of them in the replay.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)(std::string_view)) {
    targets().push_back({name, run});
  }
};

/// A broken promise: prints it and aborts, which libFuzzer and the replay report with the input.
inline void require(bool holds, const char* promise) {
  if (holds) return;
  std::cerr << "fuzz: broken promise: " << promise << std::endl;
  std::abort();
}

/// Runs `parse`. True: accepted. False: refused with InputError or UsageError, which name a cause. Every other exception escapes.
template <class Parse>
bool accepts(Parse&& parse) {
  try {
    parse();
    return true;
  } catch (const InputError& error) {
    require(error.what()[0] != '\0', "an error says what is wrong");
  } catch (const UsageError& error) {
    require(error.what()[0] != '\0', "an error says what is wrong");
  }
  return false;
}

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// Takes a little-endian u64 from the front of the input: what the parser learns from elsewhere, such as the size of another file.
inline std::uint64_t take_u64(std::string_view& input) {
  std::uint64_t value = 0;
  const std::size_t count = std::min(input.size(), sizeof(value));
  if (count > 0) std::memcpy(&value, input.data(), count);
  input.remove_prefix(count);
  return value;
}

}  // namespace moesaic::fuzz

/// Defines the target `name`: MOESAIC_FUZZ_TARGET(yaml) { … input … }
#define MOESAIC_FUZZ_TARGET(name)                                                    \
  static void run_target(std::string_view input);                                    \
  static const ::moesaic::fuzz::Registration target_registration(#name, run_target); \
  static void run_target(std::string_view input)
