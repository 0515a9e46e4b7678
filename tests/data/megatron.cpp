// Megatron pairs: the writer, the reader, and every shape that is not one.
#include <numeric>

#include <fcntl.h>

#include "core/data/dataset.h"
#include "core/data/megatron_index.h"
#include "core/data/megatron_source.h"
#include "core/data/megatron_writer.h"
#include "core/data/token_files.h"
#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// What the index says about a .bin file of 18 bytes (nine u16 tokens).
std::string index_error(const IndexParts& parts, std::uint64_t bin_bytes = 18) {
  const std::string text = parts.bytes();
  return input_error([&] { MegatronIndex(bytes_of(text), bin_bytes, "d.idx", "d.bin"); });
}

}  // namespace

TEST_CASE("a pair that data.format calls text is named") {
  const Folder folder("called_text");
  MegatronWriter writer(folder / "web",
                        {.vocab_size = 256,
                         .tokenizer = "bytes",
                         .tokenizer_hash = "bytes",
                         .end_of_text = 0,
                         .overwrite = false});
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  writer.finish();
  FileOptions options;
  options.vocab_size = 256;
  options.format = config::DataFormat::bytes_text;
  CHECK(has(input_error([&] { open_path(folder / "web", options); }), "but a Megatron pair"));
  options.format = config::DataFormat::automatic;
  CHECK(open_path(folder / "web", options)->num_documents() == 1);
}

TEST_CASE("a written pair is read back, in both token types") {
  const Folder folder("writer");
  for (const std::int64_t vocab : {65499, 65500, 163840}) {
    const std::string prefix = folder / ("deep/tokens" + std::to_string(vocab));
    const std::vector<std::vector<std::int32_t>> documents{
        {1, 2, static_cast<std::int32_t>(vocab) - 1},
        {},
        {7},
        std::vector<std::int32_t>(70000, 11)};
    MegatronWriter writer(prefix,
                          {.vocab_size = vocab,
                           .tokenizer = "bytes",
                           .tokenizer_hash = "ab12",
                           .end_of_text = 0,
                           .overwrite = false});
    for (const auto& d : documents)
      writer.add_document(d);
    CHECK(!std::filesystem::exists(prefix + ".bin"));
    const TokenMeta meta = writer.finish();
    CHECK((meta.documents == 4 && meta.tokens == 70004));
    const auto source = open_megatron(prefix, vocab);
    REQUIRE(source->num_documents() == 4);
    for (std::size_t d = 0; d < documents.size(); ++d)
      CHECK(tokens_of(*source, static_cast<std::int64_t>(d)) == documents[d]);
    CHECK(source->info().type == (vocab < 65500 ? "u16" : "i32"));
    CHECK(source->info().end_of_text == 0);
    REQUIRE(source->info().meta);
    CHECK((source->info().meta->tokenizer == "bytes" && source->info().meta->vocab_size == vocab));
    // A model with a smaller vocabulary is refused, by the description or, without it, by the tokens.
    CHECK(has(input_error([&] { open_megatron(prefix, vocab - 1); }),
              ".meta.json: the data was made"));
    std::filesystem::remove(prefix + ".meta.json");
    const std::string error = input_error([&] { open_megatron(prefix, vocab - 1); });
    CHECK(has(error, prefix + ".bin:" + (vocab < 65500 ? "4" : "8") + ": token id "));
    CHECK(has(error, "in document 0"));
  }
  int left = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "deep"))
    left += entry.path().extension() == ".tmp" ? 1 : 0;
  CHECK(left == 0);
}

TEST_CASE("the writer replaces nothing unasked, and leaves nothing behind when given up") {
  const Folder folder("writer_over");
  const std::string prefix = folder / "t";
  const auto write = [&](std::int32_t token, bool overwrite, bool finish) {
    MegatronWriter writer(prefix,
                          {.vocab_size = 100,
                           .tokenizer = "",
                           .tokenizer_hash = "",
                           .end_of_text = std::nullopt,
                           .overwrite = overwrite});
    writer.add_document(std::vector<std::int32_t>{token, token});
    if (finish) writer.finish();
  };
  write(1, false, true);
  REQUIRE_THROWS_AS(write(2, false, true), UsageError);
  write(2, true, false);  // given up
  CHECK(tokens_of(*open_megatron(prefix, 100), 0) == std::vector<std::int32_t>{1, 1});
  write(3, true, true);
  CHECK(tokens_of(*open_megatron(prefix, 100), 0) == std::vector<std::int32_t>{3, 3});
  CHECK(std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 3);
  MegatronWriter empty(folder / "e",
                       {.vocab_size = 100,
                        .tokenizer = "",
                        .tokenizer_hash = "",
                        .end_of_text = std::nullopt,
                        .overwrite = false});
  empty.end_document();
  REQUIRE_THROWS_AS(empty.finish(), InputError);
}

TEST_CASE("a pair is found by prefix, index or data file") {
  const Folder folder("names");
  folder.write("a.idx", IndexParts().bytes());
  folder.write("a.bin", std::string(18, '\1'));
  for (const char* name : {"a", "a.idx", "a.bin"}) {
    INFO(name);
    const auto source = open_file(folder / name, {});
    CHECK(source->info().format == config::DataFormat::megatron);
    REQUIRE(source->num_documents() == 3);
    CHECK((source->document_length(0) == 3 && source->document_length(1) == 2 &&
           source->document_length(2) == 4));
    CHECK(source->num_tokens() == 9);
  }
  std::filesystem::remove(folder / "a.bin");
  CHECK(has(input_error([&] { open_file(folder / "a", {}); }), "a.bin: cannot open"));
  std::filesystem::rename(folder / "a.idx", folder / "b.idx");
  folder.write("a.bin", std::string(18, '\1'));
  CHECK(has(input_error([&] { open_file(folder / "a.bin", {}); }), "data.format: nanogpt"));
}

TEST_CASE("every integer type of the index is read") {
  const Folder folder("types");
  const std::vector<std::pair<std::uint8_t, std::size_t>> codes{
      {1, 1}, {2, 1}, {3, 2}, {4, 4}, {5, 8}, {8, 2}};
  for (const auto& [code, size] : codes) {
    INFO(int{code});
    IndexParts parts;
    parts.code = code;
    for (auto& offset : parts.offsets)
      offset = offset / 2 * static_cast<std::int64_t>(size);
    Bytes bin;
    for (int i = 0; i < 9; ++i) {
      std::string token(size, '\0');
      token[0] = static_cast<char>(100 + i);
      bin.text(token);
    }
    folder.write("t.idx",
                 parts.bytes() + (code == 4 ? std::string(4, '\0') : ""));  // i32 with modes
    folder.write("t.bin", bin);
    const auto source = open_megatron(folder / "t", 256);
    CHECK(tokens_of(*source, 1) == std::vector<std::int32_t>{103, 104});
    CHECK(
        has(input_error([&] { open_megatron(folder / "t", 108); }), "token id 108 in document 2"));
  }
  // Negative ids, and ids that only fit 64 bits.
  IndexParts parts;
  parts.code = 2;
  parts.offsets = {0, 3, 3, 5};
  folder.write("t.idx", parts.bytes());
  folder.write("t.bin", std::string(8, '\1') + '\xff');
  CHECK(has(input_error([&] { open_megatron(folder / "t", 256); }),
            "t.bin:8: token id -1 in document 2"));
  parts.code = 5;
  parts.offsets = {0, 24, 24, 40};
  folder.write("t.idx", parts.bytes());
  folder.write(
      "t.bin",
      Bytes().all<std::int64_t>(std::vector<std::int64_t>(8, 1)).put(std::int64_t{1} << 40));
  CHECK(
      has(input_error([&] { open_megatron(folder / "t", INT32_MAX); }), "token id 1099511627776"));
}

TEST_CASE("what is no valid index is refused with file, offset, found and allowed") {
  const auto error = [](auto change) {
    IndexParts parts;
    change(parts);
    return index_error(parts);
  };
  REQUIRE(index_error({}) == "no InputError");
  CHECK(
      has(error([](auto& p) { p.magic = "MMIDIDX\1\0"; }), "d.idx:0: not a Megatron index: magic"));
  CHECK(has(error([](auto& p) { p.version = 2; }), "d.idx:9: version 2, allowed 1"));
  CHECK(has(error([](auto& p) { p.version = std::uint64_t{1} << 56; }), "big-endian"));
  CHECK(
      has(error([](auto& p) { p.code = 6; }), "d.idx:17: type code 6 (f64): tokens are integers"));
  CHECK(has(error([](auto& p) { p.code = 7; }), "f32"));
  CHECK(has(error([](auto& p) { p.code = 0; }), "unknown type code 0"));
  CHECK(has(error([](auto& p) { p.code = 9; }), "unknown type code 9"));
  for (const std::uint64_t huge :
       {std::uint64_t{1} << 20, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    CHECK(has(error([&](auto& p) { p.sequences = huge; }), "d.idx:18: "));
    CHECK(has(error([&](auto& p) { p.entries = huge; }), "d.idx:26: "));
  }
  CHECK(has(error([](auto& p) { p.sequences = 3; }), "the file ends here"));
  CHECK(has(error([](auto& p) { p.entries = 3; }), "the file ends here"));
  CHECK(has(error([](auto& p) { p.tail = "x"; }), "the file ends here"));
  CHECK(error([](auto& p) { p.tail = std::string(4, '\1'); }) == "no InputError");  // modes
  CHECK(has(error([](auto& p) {
              p.lengths.clear();
              p.offsets.clear();
              p.documents = {0};
              p.sequences = 0;
              p.entries = 1;
            }),
            "0 sequences"));
  CHECK(has(error([](auto& p) {
              p.documents = {0};
              p.entries = 1;
            }),
            "d.idx:26: 1 entries"));
  CHECK(has(error([](auto& p) { p.lengths[2] = -2; }), "d.idx:42: length -2 of sequence 2"));
  CHECK(
      has(error([](auto& p) { p.offsets[0] = 2; }), "d.idx:50: offset 2 of sequence 0, allowed 0"));
  CHECK(has(error([](auto& p) { p.offsets[2] = 8; }), "offset 8 of sequence 2, allowed 6"));
  CHECK(has(error([](auto& p) { p.offsets[2] = -6; }), "offset -6"));
  CHECK(has(error([](auto& p) { p.offsets[2] = INT64_MAX; }), "offset 9223372036854775807"));
  CHECK(has(error([](auto& p) { p.documents[0] = 1; }),
            "entry 0 of the document index is 1, allowed 0"));
  CHECK(has(error([](auto& p) { p.documents[3] = 3; }),
            "entry 3 of the document index is 3, allowed 4"));
  CHECK(has(error([](auto& p) {
              p.documents = {0, 3, 1, 4};
            }),
            "entry 2 of the document index is 1"));
  CHECK(has(error([](auto& p) { p.documents[1] = 5; }), "entry 1"));
  CHECK(has(error([](auto& p) { p.documents[1] = -1; }), "entry 1"));
  // The data file is shorter or longer than the index says.
  CHECK(has(index_error({}, 17), "d.bin:17: the file ends here"));
  CHECK(has(index_error({}, 0), "d.bin:0: the file ends here"));
  CHECK(has(index_error({}, 20), "d.bin:18: the last sequence"));
  CHECK(has(error([](auto& p) { p.lengths[0] = INT32_MAX; }),
            "d.bin:18: the file ends here, but sequence 0 of d.idx reaches to byte 4294967294"));
}

TEST_CASE("every cut and every damaged byte of an index is refused or harmless") {
  const std::string good = IndexParts().bytes();
  for (std::size_t n = 0; n < good.size(); ++n) {
    INFO("cut to " << n);
    CHECK(input_error([&] { MegatronIndex(bytes_of(good.substr(0, n)), 18, "d.idx", "d.bin"); }) !=
          "no InputError");
  }
  int accepted = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (const int flip : {0x01, 0x80, 0xff}) {
      std::string text = good;
      text[i] = static_cast<char>(text[i] ^ flip);
      try {
        const MegatronIndex index(bytes_of(text), 18, "d.idx", "d.bin");
        ++accepted;  // another type of two bytes, another split into documents
        std::int64_t sum = 0;
        for (std::int64_t d = 0; d < index.num_documents(); ++d)
          sum += index.document_length(d);
        CHECK(sum == index.num_tokens());
      } catch (const InputError&) {
      }
    }
  }
  CHECK(accepted < 12);
}

TEST_CASE("files taken for an index say what they are") {
  const auto error = [](const std::string& text) {
    return input_error([&] { MegatronIndex(bytes_of(text), 18, "d.idx", "d.bin"); });
  };
  CHECK(has(error(""), "an empty file"));
  CHECK(has(error("hello world, this is text\n"), "a text file"));
  CHECK(has(error("hello world, this is text\n"), "magic \"hello world, thi\""));
  CHECK(has(error("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
            "git lfs pull"));
  CHECK(has(error(std::string("TNTIDX\0\0\1", 9)), "--dataset-impl mmap"));
  CHECK(has(error(std::string(100, '\0')), "zero bytes only"));
  CHECK(has(error("\x1f\x8b\b\0"), "gzip"));
}

TEST_CASE("a pair of 600 GB is opened and read anywhere in little memory") {
  const Folder folder("sparse");
  constexpr std::int64_t kTokens = 150'000'000'000;  // i32: 600 GB
  constexpr std::int64_t kEach = 2'000'000'000;
  IndexParts parts;
  parts.code = 4;
  parts.lengths.clear();
  parts.offsets.clear();
  parts.documents = {0};
  for (std::int64_t at = 0; at < kTokens; at += kEach) {
    parts.lengths.push_back(static_cast<std::int32_t>(kEach));
    parts.offsets.push_back(4 * at);
    parts.documents.push_back(static_cast<std::int64_t>(parts.lengths.size()));
  }
  parts.sequences = parts.lengths.size();
  parts.entries = parts.documents.size();
  folder.write("big.idx", parts.bytes());
  folder.write("big.bin", "");
  if (::truncate((folder / "big.bin").c_str(), 4 * kTokens) != 0) {
    WARN("this file system has no sparse files of 600 GB");
    return;
  }
  {
    std::fstream bin(folder / "big.bin", std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](std::int64_t token, std::int32_t value) {
      bin.seekp(4 * token);
      bin.write(reinterpret_cast<const char*>(&value), 4);
    };
    put(kTokens - 1, 77);
    put(40 * kEach + 5, 99999);
  }
  const auto source = std::shared_ptr<const TokenSource>(open_megatron(folder / "big", 100));
  CHECK(source->num_tokens() == kTokens);
  std::vector<std::int32_t> last(3);
  source->read(source->num_documents() - 1, kEach - 3, last);
  CHECK(last == std::vector<std::int32_t>{0, 0, 77});
  // Too large to be looked at as a whole: a bad id is found when its window is read.
  const std::string error = input_error([&] { last.resize(8), source->read(40, 0, last); });
  CHECK(has(error,
            "big.bin:" + std::to_string(4 * (40 * kEach + 5)) + ": token id 99999 in document 40"));
  const PackedDataset set(source, 1, 0, 4096);
  CHECK(set.samples_per_epoch() == (kTokens - 1) / 4096);
  CHECK(set.batch({set.samples_per_epoch() - 1, 2}).tokens.size() == 8192);
}

}  // namespace moesaic::data
