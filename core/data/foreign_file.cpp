#include "core/data/foreign_file.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::data {
namespace {

struct Known {
  std::string_view start;
  const char* meaning;
};

constexpr std::array<Known, 14> kKnown{{
    {"version https://git-lfs",
     "a Git LFS pointer, not the data; fetch the file with 'git lfs pull'"},
    {std::string_view("MMIDIDX\0\0", 9), "a Megatron index (.idx)"},
    {std::string_view("TNTIDX\0\0", 8),
     "an index of Megatron's older format, which was not made for mapping; tokenise again with "
     "--dataset-impl mmap"},
    {"BIN.TOK\n", "a token file of LLMQ, which is not supported; moesaic writes Megatron files"},
    {"\x01\x34\xD8\x88", "a GPT-2 token file of llm.c in big-endian byte order; swap its bytes"},
    {"\x01\x34\xD9\xA1", "a Llama 3 token file of llm.c in big-endian byte order; swap its bytes"},
    {"\x1f\x8b", "a gzip file; unpack it"},
    {"\x28\xb5\x2f\xfd", "a zstd file; unpack it"},
    {"\xfd"
     "7zXZ",
     "an xz file; unpack it"},
    {"PK\x03\x04", "a zip archive (PyTorch files are zip archives too)"},
    {"\x93NUMPY", "a NumPy file (.npy); write its numbers without header with array.tofile()"},
    {"PAR1", "a Parquet file; export its text as JSONL and tokenise that"},
    {"ARROW1", "an Arrow file; export its text as JSONL and tokenise that"},
    {"<!DOCTYPE html", "a web page: the download went to an error or log-in page"},
}};

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool is_text_byte(char c) {
  const auto u = static_cast<unsigned char>(c);
  return u >= 0x20 ? u != 0x7f : u == '\n' || u == '\r' || u == '\t' || u == '\f';
}

}  // namespace

std::string looks_like(std::span<const std::byte> bytes) {
  if (bytes.empty()) return "an empty file; a copy or a writer did not finish";
  const std::string_view text = text_of(bytes.first(std::min<std::size_t>(bytes.size(), 512)));
  for (const Known& known : kKnown) {
    if (text.starts_with(known.start)) return known.meaning;
  }
  if (std::all_of(text.begin(), text.end(), [](char c) { return c == 0; }))
    return "zero bytes only: a copy that did not finish, or a file with holes";
  if (std::all_of(text.begin(), text.end(), is_text_byte)) return "a text file";
  return "";
}

void bad_file(const std::string& file, std::uint64_t offset, const std::string& message) {
  throw InputError(fmt::format("{}:{}: {}", file, offset, message));
}

std::string shown_bytes(std::span<const std::byte> bytes) {
  const std::string_view text = text_of(bytes.first(std::min<std::size_t>(bytes.size(), 16)));
  if (std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; }))
    return fmt::format("\"{}\"", text);
  std::string hex;
  for (const char c : text)
    hex += fmt::format("{}{:02x}", hex.empty() ? "" : " ", static_cast<unsigned char>(c));
  return hex;
}

}  // namespace moesaic::data
