// Files of llm.c and nanoGPT, folders and patterns.
#include "core/data/llmc_header.h"
#include "core/data/raw_source.h"
#include "core/data/token_files.h"
#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

std::string llmc_file(std::int32_t magic,
                      std::int32_t version,
                      std::int32_t count,
                      const std::string& body) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return Bytes().all<std::int32_t>(header).text(body);
}
std::string u16(const std::vector<int>& tokens) {
  return Bytes().all<std::uint16_t>(tokens);
}
std::string u32(const std::vector<int>& tokens) {
  return Bytes().all<std::uint32_t>(tokens);
}

}  // namespace

TEST_CASE("files of llm.c are read with documents closed by their end-of-text token") {
  const Folder folder("llmc");
  const std::string gpt2 =
      folder.write("g.bin", llmc_file(20240520, 1, 7, u16({50256, 1, 2, 3, 50256, 4, 5})));
  const auto source = open_file(gpt2, {});
  CHECK(source->info().format == config::DataFormat::llmc);
  REQUIRE(source->num_documents() == 3);  // the first token, one document, and the rest
  CHECK(tokens_of(*source, 0) == std::vector<std::int32_t>{50256});
  CHECK(tokens_of(*source, 1) == std::vector<std::int32_t>{1, 2, 3, 50256});
  CHECK(tokens_of(*source, 2) == std::vector<std::int32_t>{4, 5});
  CHECK(open_llmc(gpt2, 50257, 3)->num_documents() == 2);
  CHECK(has(input_error([&] { open_llmc(gpt2, 50256, std::nullopt); }),
            "g.bin:1024: token id 50256 in document 0"));
  const std::string llama = folder.write("l.bin", llmc_file(20240801, 7, 3, u32({7, 128000, 9})));
  CHECK(tokens_of(*open_file(llama, {}), 0) == std::vector<std::int32_t>{7, 128000});
}

TEST_CASE("a header of llm.c that does not fit its file is refused") {
  const Folder folder("llmc_bad");
  const auto error = [&](const std::string& bytes) {
    const std::string path = folder.write("x.bin", bytes);
    return input_error([&] { open_llmc(path, 60000, std::nullopt); });
  };
  const std::string body = u16({1, 2, 3});
  CHECK(error(llmc_file(20240520, 1, 3, body)) == "no InputError");
  CHECK(has(error(llmc_file(20240520, 2, 3, body)), "x.bin:4: version 2"));
  CHECK(has(error(llmc_file(20240520, 7, 3, body)), "x.bin:4: version 7"));
  CHECK(has(error(llmc_file(20240801, 1, 3, body)), "allowed 7"));
  CHECK(has(error(llmc_file(20240520, 1, 4, body)), "x.bin:8: 4 tokens in the header"));
  CHECK(has(error(llmc_file(20240520, 1, 2, body)), "x.bin:8: 2 tokens"));
  CHECK(has(error(llmc_file(20240520, 1, -3, body)), "-3 tokens"));
  CHECK(has(error(llmc_file(20240520, 1, INT32_MIN, body)), "tokens in the header"));
  CHECK(has(error(llmc_file(20240520, 1, 0, "")), "0 tokens"));
  CHECK(has(error(llmc_file(20240520, 1, 3, body + "x")), "not a whole number"));
  CHECK(has(error(llmc_file(20240801, 7, 3, body)),
            "3 tokens in the header"));  // u16 under a u32 header
  CHECK(has(error(llmc_file(20240522, 1, 3, body)), "an evaluation file"));
  CHECK(has(error(llmc_file(20240326, 3, 3, body)), "a model"));
  CHECK(has(error(llmc_file(20240520, 1, 3, body).substr(0, 600)),
            "x.bin:600: the file ends inside the header"));
  CHECK(has(error(""), "an empty file"));
  CHECK(has(error("abc"), "magic missing"));
  CHECK(has(error("some text that is long enough"), "a text file"));
}

TEST_CASE("raw tokens take type and documents from the options") {
  const Folder folder("raw");
  const std::string path = folder.write("train.bin", u16({9, 300, 2, 9, 9, 4}));
  FileOptions options;
  CHECK(has(input_error([&] { open_file(path, options); }),
            "data.format: nanogpt"));  // nothing says what it is
  options.format = config::DataFormat::nanogpt;
  const auto whole = open_file(path, options);
  REQUIRE(whole->num_documents() == 1);
  CHECK(tokens_of(*whole, 0) == std::vector<std::int32_t>{9, 300, 2, 9, 9, 4});
  options.end_of_text = 9;
  const auto split = open_file(path, options);
  REQUIRE(split->num_documents() == 4);
  CHECK(split->document_length(0) == 1);
  CHECK(tokens_of(*split, 1) == std::vector<std::int32_t>{300, 2, 9});
  CHECK(tokens_of(*split, 3) == std::vector<std::int32_t>{4});
  options.raw_type = TokenType::u32;
  options.vocab_size = 1000;
  CHECK(has(input_error([&] { open_file(path, options); }), "train.bin:0: token id 19660809"));
  options.raw_type = TokenType::u16;
  options.vocab_size = 300;
  CHECK(has(input_error([&] { open_file(path, options); }),
            "train.bin:2: token id 300 in document 1"));
  options.end_of_text.reset();
  CHECK(has(input_error([&] { open_file(path, options); }),
            "train.bin:2: token id 300 in document 0"));
  CHECK(
      has(input_error([&] { open_raw(folder.write("odd.bin", "\1\2\3"), 9, {}, TokenType::u16); }),
          "odd.bin:3: the file ends inside a token"));
  CHECK(has(input_error([&] { open_raw(folder.write("e.bin", ""), 9, {}, TokenType::u16); }),
            "the file is empty"));
  CHECK(has(input_error([&] {
              open_raw(folder.write("t.bin", "plain text, no numbers"), 99999, {}, TokenType::u16);
            }),
            "it starts like a text file"));
  CHECK(has(
      input_error([&] {
        open_raw(
            folder.write("l.bin", llmc_file(20240520, 1, 1, u16({1}))), 99999, {}, TokenType::u16);
      }),
      "data.format: llmc"));
  CHECK(has(input_error([&] { open_file(folder / "none.bin", {}); }), "none.bin: cannot open"));
}

TEST_CASE("a folder and a pattern stand for their files in sorted order") {
  const Folder folder("folder");
  CHECK(has(input_error([&] { expand_path(folder.path()); }), "a folder without data files"));
  folder.write("b.txt", "second");
  folder.write("a.idx", IndexParts().bytes());
  folder.write("a.bin", std::string(18, '\1'));
  folder.write("a.meta.json", "{}");
  folder.write("README.md", "not data");
  folder.write(".hidden.txt", "not data");
  folder.write("c.bin", llmc_file(20240520, 1, 1, u16({1})));
  std::filesystem::create_directory(folder / "sub");
  CHECK(expand_path(folder.path()) ==
        std::vector<std::string>{folder / "a", folder / "b.txt", folder / "c.bin"});
  CHECK(expand_path(folder / "*.bin") == std::vector<std::string>{folder / "a", folder / "c.bin"});
  CHECK(expand_path(folder / "a.*") == std::vector<std::string>{folder / "a"});
  CHECK(expand_path(folder / "b.txt") == std::vector<std::string>{folder / "b.txt"});
  CHECK(has(input_error([&] { expand_path(folder / "*.zip"); }), "no file matches"));
  folder.write("[odd].txt", "a name with brackets");
  CHECK(expand_path(folder / "[odd].txt") == std::vector<std::string>{folder / "[odd].txt"});
}

}  // namespace moesaic::data
