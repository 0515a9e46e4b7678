// Documents out of text and JSONL files, and tokens out of documents: the same for any number of threads.
#include "core/data/tokenize.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/data/document_reader.h"
#include "core/data/json_line.h"
#include "core/data/megatron_source.h"
#include "core/tokenizer/tokenizer.h"
#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

struct Read {
  std::vector<std::string> documents, places;
  std::int64_t pieces = 0, empty = 0;
};
Read read_all(const std::vector<std::string>& files, const ReaderOptions& options = {}) {
  DocumentReader reader(files, options);
  Read all;
  bool open = false;
  for (TextPiece piece; reader.next(piece); ++all.pieces) {
    if (!open) {
      all.documents.emplace_back();
      all.places.push_back(reader.where(piece));
    }
    all.documents.back() += piece.text;
    open = !piece.ends_document;
  }
  CHECK(!open);
  all.empty = reader.empty_documents();
  return all;
}

TokenizeStats write_tokens(const std::string& prefix,
                           const std::vector<std::string>& files,
                           const ReaderOptions& reading,
                           const TokenizeOptions& options) {
  const auto tokenizer = tokenizer::byte_tokenizer();
  DocumentReader reader(files, reading);
  MegatronWriter writer(prefix, {.vocab_size = 256, .end_of_text = 0});
  const auto stats = tokenize(reader, *tokenizer, writer, options, [](const TokenizeStats&) {});
  writer.finish();
  return stats;
}

std::uint32_t draw(std::uint64_t& state, std::uint32_t below) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return static_cast<std::uint32_t>(state >> 33) % below;
}

}  // namespace

TEST_CASE("text files: form-feed lines separate documents", "[tokenize]") {
  const Folder folder("reader");
  const auto documents = [&](const std::string& text) {
    return read_all({folder.write("a.txt", text)}).documents;
  };
  using List = std::vector<std::string>;
  CHECK(documents("one\n\f\ntwo\nlines\n\f\n") == List{"one\n", "two\nlines\n"});
  CHECK(documents("\f\n\f\nx\n\f") == List{"x\n"});
  CHECK(documents("a\fb\n\fc\nd\f\n\f\ne") == List{"a\fb\n\fc\nd\f\n", "e"});
  CHECK(documents("").empty());
  const auto b = folder.write("b.txt", "\n\nlast"), c = folder.write("c.txt", "");
  const Read all = read_all({folder.write("a.txt", "1\n\f\n\f\n2"), b, c});
  CHECK(all.documents == List{"1\n", "2", "\n\nlast"});
  CHECK(all.empty == 1);
  CHECK(all.places == List{folder / "a.txt:1", folder / "a.txt:4", folder / "b.txt:1"});
}

TEST_CASE("text files: what is read does not depend on where reads end", "[tokenize]") {
  const Folder folder("reads");
  std::uint64_t state = 5;
  const char* const bits[] = {
      "word ", "\n", "\f", "\f\n", "\n\f\n", "longer line without anything\n"};
  for (int round = 0; round < 20; ++round) {
    // The reader reads a MiB at a time: separators around that place.
    std::string text((std::size_t{1} << 20) - 40, 'x');
    text += '\n';
    for (int i = 0; i < 40; ++i)
      text += bits[draw(state, 6)];
    const auto path = folder.write("a.txt", text);
    const auto source = open_text(path);
    const Read all = read_all({path});
    REQUIRE(static_cast<std::int64_t>(all.documents.size()) == source->num_documents());
    for (std::size_t d = 0; d < all.documents.size(); ++d) {
      auto tokens = tokens_of_text(all.documents[d]);
      tokens.push_back(kEndOfText);
      CHECK(tokens == tokens_of(*source, static_cast<std::int64_t>(d)));
    }
  }
}

TEST_CASE("JSONL files: the member is found, errors name file and line", "[tokenize]") {
  const Folder folder("jsonl");
  const Read all =
      read_all({folder.write("a.jsonl",
                             "\xEF\xBB\xBF{\"id\": {\"text\": 1}, \"text\": "
                             "\"a\\u00e9\\n\"}\r\n\n{\"text\":\"\"}\n{\"text\":\"b\"}")});
  CHECK(all.documents == std::vector<std::string>{"a\xC3\xA9\n", "b"});
  CHECK(all.empty == 1);
  CHECK(all.places[1] == folder / "a.jsonl:4");
  const auto error = [&](const std::string& line) {
    return input_error(
        [&] { read_all({folder.write("b.jsonl", "{\"text\": \"fine\"}\n" + line + "\n")}); });
  };
  CHECK(has(error("{\"body\": \"x\", \"id\": 3}"),
            "b.jsonl:2: has no member \"text\"; there are: body id (--json-key)"));
  CHECK(has(error("{\"text\": 5}"), "b.jsonl:2: \"text\" is a number, must be a string"));
  CHECK(has(error("{\"text\": [\"x\"]}"), "b.jsonl:2: \"text\" is a list"));
  CHECK(has(error("{\"text\": \"x\", \"text\": \"y\"}"),
            "b.jsonl:2:15: the key \"text\" is given twice"));
  CHECK(
      has(error("{\"text\": \"x\", \"id\": {\"a\": 1, \"a\": 2}}"), "b.jsonl:2:30: the key \"a\""));
  CHECK(has(error("[\"x\"]"), "b.jsonl:2: is a list, must be an object"));
  CHECK(has(error("{\"text\": \"x\"} trailing"), "b.jsonl:2:17: not valid JSON: syntax error"));
  CHECK(has(error("{\"text\": \"x"), "b.jsonl:2:12: not valid JSON"));
  CHECK(has(error("{\"text\": \"\xFF\"}"), "b.jsonl:2:11: not valid JSON"));
  CHECK(has(error("{\"a\": " + std::string(100, '[')), "b.jsonl:2:70: nested more than 64"));
  CHECK(has(error("{\"text\": \"x\"}" + std::string(1, '\0') + "{\"text\": \"lost\"}"),
            "b.jsonl:2:14: not valid JSON: a zero byte"));
  CHECK(has(input_error([&] { read_all({folder / "none.jsonl"}); }), "none.jsonl: cannot open"));
  CHECK(has(input_error([&] { read_all({folder.write("z.txt", "\x1f\x8b\x08")}); }), "gzip"));
  CHECK(has(input_error([&] { read_all({folder.path()}); }), "a folder"));
}

TEST_CASE("long documents are refused, or come in pieces that make the whole", "[tokenize]") {
  const Folder folder("long");
  std::string text = "short\n\f\n";
  for (int i = 0; i < 3000; ++i)
    text += i % 7 == 0 ? "中文字\n" : "words and words ";
  text += std::string(5000, 'y') + "\n\f\nlast";
  const auto path = folder.write("a.txt", text);
  std::string json = "{\"text\": \"";
  for (int i = 0; i < 2000; ++i)
    json += "\\u00e9x";
  const auto jsonl = folder.write("a.jsonl", json + "\"}\n");
  const ReaderOptions strict{.max_document = 1000, .piece = 300};
  CHECK(has(input_error([&] { read_all({path}, strict); }),
            "a.txt:3: this document has more than 1000 bytes"));
  CHECK(has(input_error([&] { read_all({jsonl}, strict); }), "a.jsonl:1: this "));
  ReaderOptions split = strict;
  split.split_long = true;
  split.max_document = 4000;
  const Read whole = read_all({path, jsonl}), pieces = read_all({path, jsonl}, split);
  CHECK(pieces.documents == whole.documents);
  CHECK(pieces.places == whole.places);
  CHECK(pieces.pieces > 100);
  DocumentReader reader({path, jsonl}, split);
  for (TextPiece piece; reader.next(piece);) {
    CHECK(piece.text.size() <= (piece.ends_document ? 4000U : 300U));
    CHECK((static_cast<unsigned char>(piece.text[0]) & 0xC0) != 0x80);  // a character's start
  }
}

TEST_CASE("tokens do not depend on threads, memory or batches", "[tokenize]") {
  const Folder folder("threads");
  std::uint64_t state = 9;
  std::string text;
  for (int d = 0; d < 20000; ++d)  // tiny ones, and some larger than a batch
    text +=
        std::string(d % 5000 == 77 ? 700000 : draw(state, 40), static_cast<char>('a' + d % 26)) +
        "\n\f\n";
  const auto path = folder.write("a.txt", text);
  TokenizeOptions options{.end_of_text = 0, .threads = 1};
  const auto stats = write_tokens(folder / "one", {path}, {}, options);
  CHECK(stats.documents == 20000);
  CHECK(stats.text_bytes + stats.documents == stats.tokens);
  CHECK(stats.bytes_read == static_cast<std::int64_t>(text.size()));
  const auto source = open_text(path);
  const auto written = open_megatron(folder / "one", 256);
  REQUIRE(written->num_documents() == source->num_documents());
  for (const std::int64_t d : {0, 1, 76, 77, 78, 19999})
    CHECK(tokens_of(*written, d) == tokens_of(*source, d));
  const std::string bin = file_bytes(folder / "one.bin"), idx = file_bytes(folder / "one.idx");
  for (const int threads : {2, 5}) {
    options.threads = threads;
    options.bytes_in_flight = threads == 5 ? 1 : 1 << 20;
    const std::string prefix = folder / ("with" + std::to_string(threads));
    write_tokens(prefix, {path}, {.max_document = 1000, .split_long = true, .piece = 100}, options);
    CHECK((file_bytes(prefix + ".bin") == bin && file_bytes(prefix + ".idx") == idx));
  }
}

TEST_CASE("an error stops everything, the first in the input is told, and no files stay",
          "[tokenize]") {
  const Folder folder("errors");
  std::string lines;
  for (int i = 1; i <= 30000; ++i)
    lines += i == 20001 || i == 29000 ? "{\"text\": 1}\n" : "{\"text\": \"some words\"}\n";
  const auto path = folder.write("a.jsonl", lines);
  const auto zero = folder.write("b.txt", std::string("fine\n\f\nx\0y", 11));
  for (const int threads : {1, 4}) {
    TokenizeOptions options{.end_of_text = 0, .threads = threads, .bytes_in_flight = 1 << 16};
    CHECK(has(input_error([&] {
                write_tokens(folder / "x", {path, zero}, {}, options);
              }),
              "a.jsonl:20001:"));
    CHECK(has(input_error([&] {
                write_tokens(folder / "x", {zero, path}, {}, options);
              }),
              "b.txt:3: a zero byte at offset 1"));
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    CHECK(entry.path().extension() != ".tmp");
  CHECK(!std::filesystem::exists(folder / "x.idx"));
  const auto empty = folder.write("e.txt", "\f\n\f\n");
  CHECK(has(input_error([&] { write_tokens(folder / "x", {empty}, {}, {}); }), "nothing to write"));
}

}  // namespace moesaic::data
