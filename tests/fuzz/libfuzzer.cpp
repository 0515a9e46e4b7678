// Entry of libFuzzer, for the one target that is linked beside it.
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A copy of exactly this size, on the heap: a byte read beyond it is an error of AddressSanitizer.
  static const moesaic::fuzz::Target target = moesaic::fuzz::targets().at(0);
  const std::vector<char> input(data, data + size);
  target.run({input.data(), input.size()});
  return 0;
}
