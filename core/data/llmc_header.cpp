#include "core/data/llmc_header.h"

#include <cstring>

#include <fmt/format.h>

#include "core/data/foreign_file.h"

namespace moesaic::data {
namespace {

constexpr std::int32_t kGpt2 = 20240520, kLlama3 = 20240801;
constexpr std::int32_t kEval = 20240522, kModel = 20240326;

std::int32_t word(std::span<const std::byte> file, std::size_t i) {
  std::int32_t value;
  std::memcpy(&value, file.data() + 4 * i, 4);
  return value;
}

}  // namespace

bool has_llmc_magic(std::span<const std::byte> file) {
  if (file.size() < 4) return false;
  const std::int32_t magic = word(file, 0);
  return magic == kGpt2 || magic == kLlama3 || magic == kEval || magic == kModel;
}

LlmcHeader parse_llmc_header(std::span<const std::byte> file, const std::string& name) {
  if (!has_llmc_magic(file)) {
    const std::string kind = looks_like(file);
    bad_file(
        name,
        0,
        fmt::format("not a token file of llm.c: magic {}, allowed {} (GPT-2) and {} (Llama 3){}",
                    file.size() < 4 ? "missing" : fmt::to_string(word(file, 0)),
                    kGpt2,
                    kLlama3,
                    kind.empty() ? "" : "; this is " + kind));
  }
  const std::int32_t magic = word(file, 0);
  if (magic == kEval || magic == kModel) {
    bad_file(name,
             0,
             fmt::format("{} of llm.c, not a token file (magic {}, allowed {} and {})",
                         magic == kEval ? "an evaluation file" : "a model",
                         magic,
                         kGpt2,
                         kLlama3));
  }
  if (file.size() < LlmcHeader::kBytes) {
    bad_file(name,
             file.size(),
             fmt::format("the file ends inside the header of {} bytes; copy it again",
                         LlmcHeader::kBytes));
  }
  const std::int32_t version = word(file, 1), expected = magic == kGpt2 ? 1 : 7;
  if (version != expected) {
    bad_file(
        name,
        4,
        fmt::format("version {} of a file with magic {}, allowed {}", version, magic, expected));
  }
  LlmcHeader header;
  header.type = magic == kGpt2 ? TokenType::u16 : TokenType::u32;
  header.end_of_text = magic == kGpt2 ? 50256 : 128000;
  const std::size_t size = byte_size(header.type), body = file.size() - LlmcHeader::kBytes;
  const std::int32_t count = word(file, 2);
  if (count < 1 || static_cast<std::size_t>(count) * size != body) {
    bad_file(
        name,
        8,
        fmt::format("{} tokens in the header, but {} bytes of {} follow it ({}); the file is cut "
                    "or the header is wrong",
                    count,
                    body,
                    data::name(header.type),
                    body % size == 0 ? fmt::format("{} tokens", body / size)
                                     : "not a whole number of tokens"));
  }
  header.num_tokens = count;
  return header;
}

}  // namespace moesaic::data
