// The tokenizers' end of tests/oracles/compare_tokenizers.py. Reads texts from standard input, each a u32 of its length and its
// bytes; writes for each a u32 of the number of ids, the i32 ids, a u32 of the length of the text decoded from them, and
// that text. Integers are little-endian. Closes with the processor seconds that encoding took, as f64, and those of loading.
#include <cstdint>
#include <ctime>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "core/tokenizer/tokenizer.h"
#include "core/tokenizer/unicode.h"

namespace {

// Processor time of this process, which has one thread: other work on the machine does not count.
double processor_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

template <class T>
void write(const T* values, std::size_t count) {
  std::cout.write(reinterpret_cast<const char*>(values),
                  static_cast<std::streamsize>(count * sizeof(T)));
}

void write_count(std::size_t count) {
  const auto n = static_cast<std::uint32_t>(count);
  write(&n, 1);
}

int run(const std::string& spec, const moesaic::tokenizer::EncodeOptions& options) {
  const double start = processor_seconds();
  const auto tokenizer = moesaic::tokenizer::open_tokenizer(spec);
  const auto encoder = tokenizer->encoder(options);
  const double loading = processor_seconds() - start;
  double encoding = 0;
  std::vector<std::int32_t> ids;
  for (std::uint32_t size; std::cin.read(reinterpret_cast<char*>(&size), sizeof size);) {
    std::string text(size, '\0');
    if (!std::cin.read(text.data(), size)) return 3;
    ids.clear();
    const double begin = processor_seconds();
    encoder->encode(text, ids);
    encoding += processor_seconds() - begin;
    write_count(ids.size());
    write(ids.data(), ids.size());
    const std::string back = tokenizer->decode(ids);
    write_count(back.size());
    write(back.data(), back.size());
  }
  write(&encoding, 1);
  write(&loading, 1);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[2] : "";
  if (argc < 2 || (!mode.empty() && mode != "--special-as-text" && mode != "--add-special")) {
    std::cerr << "usage: encode_texts TOKENIZER [--special-as-text | --add-special] < frames\n";
    return 2;
  }
  if (std::string(argv[1]) == "--version") {
    std::cout << moesaic::tokenizer::unicode_libraries() << '\n';
    return 0;
  }
  try {
    return run(
        argv[1],
        {.parse_special = mode != "--special-as-text", .add_special = mode == "--add-special"});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 3;
  }
}
