// Conversations: the template, what is a target, what is refused, and whole documents in windows.
#include <algorithm>
#include <numeric>
#include <set>

#include "core/data/chat_record.h"
#include "core/data/chat_source.h"
#include "core/data/dataset.h"
#include "core/data/document_bound.h"
#include "core/data/token_files.h"
#include "core/data/windows.h"
#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

const char* const kTwoTurns =
    R"({"id": 7, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 1}, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]})";

std::string record_error(const std::string& line) {
  return input_error([&] { parse_chat_record(line, "f.jsonl:0"); });
}

// The text of the targets, one per run of them.
std::vector<std::string> targets_of(const TokenSource& source, std::int64_t document) {
  const auto tokens = tokens_of(source, document);
  std::vector<char> mask(tokens.size());
  source.read_targets(document, 0, mask);
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (mask[i] == 0) continue;
    if (i == 0 || mask[i - 1] == 0) runs.emplace_back();
    runs.back() += tokens[i] == kEndOfText ? "$" : std::string(1, static_cast<char>(tokens[i]));
  }
  return runs;
}

// Bytes, and two words that only marks may spell; documents end with 302 or with nothing.
class WordTokenizer final : public tokenizer::Tokenizer {
 public:
  explicit WordTokenizer(bool ends) : ends_(ends) {}
  class Words final : public tokenizer::Encoder {
   public:
    explicit Words(bool special) : special_(special) {}
    void encode(std::string_view text, std::vector<std::int32_t>& out) override {
      while (!text.empty()) {
        const bool start = special_ && text.starts_with("<|im_start|>"),
                   end = special_ && text.starts_with("<|im_end|>");
        out.push_back(start ? 300 : end ? 301 : static_cast<unsigned char>(text[0]));
        text.remove_prefix(start ? 12 : end ? 10 : 1);
      }
    }

   private:
    bool special_;
  };
  std::unique_ptr<tokenizer::Encoder> encoder(const tokenizer::EncodeOptions& o) const override {
    return std::make_unique<Words>(o.parse_special);
  }
  std::string decode(std::span<const std::int32_t>, bool) const override { return ""; }
  std::int64_t vocab_size() const noexcept override { return 303; }
  const std::vector<tokenizer::NamedToken>& named_tokens() const noexcept override {
    return named_;
  }
  std::optional<std::int32_t> end_of_text() const noexcept override {
    return ends_ ? std::optional(302) : std::nullopt;
  }
  const std::string& name() const noexcept override { return name_; }
  const std::string& content_hash() const noexcept override { return name_; }

 private:
  bool ends_;
  std::vector<tokenizer::NamedToken> named_;
  std::string name_ = "words";
};

}  // namespace

TEST_CASE(
    "with a tokenizer the template's marks are its special tokens, and nobody's text spells one") {
  const Folder folder("chat_words");
  const std::string path = folder.write(
      "w.jsonl",
      R"({"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}]})");
  for (const bool ends : {true, false}) {
    const auto source = open_chat(path, 303, WordTokenizer(ends));
    const auto tokens = tokens_of(*source, 0);
    CHECK(std::count(tokens.begin(), tokens.end(), 300) == 2);
    CHECK(std::count(tokens.begin(), tokens.end(), 301) == 2);  // and not the user's
    CHECK(std::count(tokens.begin(), tokens.end(), '|') == 2);
    std::vector<char> mask(tokens.size());
    source->read_targets(0, 0, mask);
    std::vector<std::int32_t> targets;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (mask[i] != 0) targets.push_back(tokens[i]);
    }
    CHECK(targets ==
          (ends ? std::vector<std::int32_t>{'b', 301, 302} : std::vector<std::int32_t>{'b', 301}));
    CHECK(tokens.back() == (ends ? 302 : 301));
  }
}

TEST_CASE("a conversation becomes text by the template, and the assistant's part is the target") {
  const Folder folder("chat");
  const std::string path = folder.write(
      "c.jsonl",
      std::string(kTwoTurns) + "\n\n" + R"({"prompt": "2+2=", "completion": "4"})" + "\r\n" +
          R"({"messages": [{"role": "assistant", "content": "ä"}, {"role": "user", "content": "?"}]})");
  FileOptions options;
  const auto source = open_file(path, options);  // by its extension
  CHECK(source->info().format == config::DataFormat::chat_jsonl);
  REQUIRE(source->num_documents() == 3);
  CHECK(text_of_tokens(tokens_of(*source, 0)) ==
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\nSo long<|im_end|>");
  CHECK(targets_of(*source, 0) ==
        std::vector<std::string>{"Hello<|im_end|>", "So long<|im_end|>$"});
  CHECK(text_of_tokens(tokens_of(*source, 1)) == "2+2=4");
  CHECK(targets_of(*source, 1) == std::vector<std::string>{"4$"});
  CHECK(targets_of(*source, 2) ==
        std::vector<std::string>{"ä<|im_end|>"});  // the user has the last word
  CHECK(tokens_of(*source, 2).back() == kEndOfText);
  options.vocab_size = 128;
  CHECK(has(input_error([&] { open_file(path, options); }), "line 4: token id 195 is not below"));
}

TEST_CASE("records that are no conversation are refused with file, offset and line") {
  CHECK(has(record_error("{"), "f.jsonl:0:2: not valid JSON"));
  CHECK(has(record_error("[1]"), "is a list, must be a JSON object"));
  CHECK(has(record_error(R"({"text": "x"})"),
            "found the keys: text; plain text is prepared with 'moesaic data tokenize'"));
  CHECK(has(record_error(R"({"messages": [], "prompt": "x", "completion": "y"})"), "either"));
  CHECK(has(record_error(R"({"messages": {}})"), "\"messages\" is an object, allowed: a list"));
  CHECK(has(record_error(R"({"messages": []})"), "no message of role \"assistant\""));
  CHECK(has(record_error(R"({"messages": [7]})"), "message 0 is an integer, allowed: an object"));
  CHECK(has(record_error(R"({"messages": [{"content": "x"}]})"), "message 0 has no \"role\""));
  CHECK(has(record_error(R"({"messages": [{"role": "assistant"}]})"),
            "message 0 has no \"content\""));
  CHECK(has(record_error(R"({"messages": [{"role": "assistant", "content": null}]})"),
            "\"content\" of message 0 is null"));
  CHECK(
      has(record_error(R"({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]})"),
          "images are not supported"));
  CHECK(has(record_error(R"({"messages": [{"role": "as sistant", "content": "x"}]})"),
            "allowed: a word"));
  CHECK(has(record_error(R"({"prompt": "x"})"), "no \"completion\""));
  CHECK(has(record_error(R"({"prompt": "x", "completion": ""})"), "nothing to learn"));
  CHECK(has(record_error(R"({"prompt": "x", "prompt": "z", "completion": "y"})"),
            ":17: the key \"prompt\" is given twice"));
  CHECK(
      has(record_error(R"({"messages": [{"role": "user", "role": "assistant", "content": "x"}]})"),
          ":32: the key \"role\" is given twice"));
  CHECK(
      record_error(
          R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]})") ==
      "no InputError");
  const std::string zero("{\"prompt\": \"x\", \"completion\": \"y\"}\0 lost", 40);
  CHECK(has(record_error(zero), ":35: not valid JSON: a zero byte"));
  std::string deep = R"({"prompt": "x", "completion": "y", "extra": )";
  CHECK(has(record_error(deep + std::string(100000, '[')), "nested more than 16 deep"));
  CHECK(record_error(deep + "[[[[[[{}]]]]]]}") == "no InputError");
  CHECK(has(record_error("{\"prompt\": \"\xff\", \"completion\": \"y\"}"),
            "not valid JSON"));  // not UTF-8
  const Folder folder("chat_bad");
  const auto error = [&](const std::string& text) {
    const std::string path = folder.write("x.jsonl", text);
    return input_error([&] { open_chat(path, 256, *tokenizer::byte_tokenizer()); });
  };
  const std::string good = R"({"prompt": "a", "completion": "b"})";
  CHECK(has(error(good + "\n" + good + "\nnot json\n"),
            "x.jsonl:" + std::to_string(2 * good.size() + 2) + ": line 3:2: not valid JSON"));
  CHECK(has(error(R"({"prompt": "a\u0000", "completion": "b"})"), "line 1: a zero byte"));
  CHECK(has(error(""), "an empty file"));
  CHECK(has(error("\n \n"), "no records"));
  CHECK(has(error("PAR1...."), "Parquet"));
  CHECK(has(error("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"));
}

TEST_CASE("whole documents lie in one window each, none is lost, and none attends to another") {
  const Folder folder("chat_pack");
  std::string text;
  std::vector<std::size_t> lengths;
  for (int i = 0; i < 60; ++i) {
    const std::string prompt(static_cast<std::size_t>(i * 7 % 23), static_cast<char>('A' + i % 26));
    const std::string completion(1 + static_cast<std::size_t>(i * 5 % 11),
                                 static_cast<char>('a' + i % 26));
    lengths.push_back(prompt.size() + completion.size() + 1);
    text += R"({"prompt": ")" + prompt + R"(", "completion": ")" + completion + "\"}\n";
  }
  const std::string path = folder.write("p.jsonl", text);
  const std::shared_ptr<const TokenSource> source =
      open_chat(path, 256, *tokenizer::byte_tokenizer());
  const std::int64_t length = 40;
  const WholeWindows windows(source, length);
  CHECK((windows.cut_documents() == 0 && windows.left_out() == 0));
  const std::size_t sum = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  CHECK(windows.count() >= static_cast<std::int64_t>((sum + 39) / 40));
  CHECK(windows.count() <= static_cast<std::int64_t>((sum + 39) / 40) + 2);  // a good packing
  const PackedDataset data(source, 3, 0, length);
  REQUIRE(data.samples_per_epoch() == windows.count());
  const DocumentBound bound(*source);
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    const Batch b = data.batch({epoch * windows.count(), windows.count()});
    CHECK(static_cast<std::int64_t>(b.cu.size()) - 1 <= bound.in(windows.count(), length));
    std::multiset<std::size_t> found;
    std::int64_t valid = 0, targets = 0;
    for (std::size_t d = 0; d + 1 < b.cu.size(); ++d) {
      const auto begin = static_cast<std::size_t>(b.cu[d]),
                 end = static_cast<std::size_t>(b.cu[d + 1]);
      if (b.tokens[begin] == 0) {  // the rest of a window
        CHECK(std::all_of(b.labels.begin() + b.cu[d], b.labels.begin() + b.cu[d + 1], [](auto l) {
          return l == kIgnoredLabel;
        }));
        continue;
      }
      found.insert(end - begin);
      CHECK(begin / 40 == (end - 1) / 40);  // inside one window
      CHECK(b.tokens[end - 1] == kEndOfText);
      CHECK(b.labels[end - 1] == kIgnoredLabel);
      for (std::size_t t = begin; t < end; ++t) {
        CHECK(b.positions[t] == static_cast<std::int32_t>(t - begin));
        if (b.labels[t] == kIgnoredLabel) continue;
        ++valid;
        CHECK(b.labels[t] == b.tokens[t + 1]);
        CHECK((b.labels[t] == 0 || b.labels[t] >= 'a'));  // of a completion
      }
    }
    for (int i = 0; i < 60; ++i)
      targets += 2 + i * 5 % 11 -
                 (i * 7 % 23 == 0 ? 1 : 0);  // without prompt nothing predicts the first token
    CHECK(found == std::multiset<std::size_t>(lengths.begin(), lengths.end()));
    CHECK((b.valid_labels == valid && valid == targets));
  }
  CHECK(data.batch({0, 1}).tokens !=
        data.batch({windows.count(), 1}).tokens);  // another order of windows
  const ValidationSet held_out(source, length, 1000);
  CHECK(held_out.num_samples() == windows.count());
}

TEST_CASE("long conversations are cut at the end, and left out where nothing to learn remains") {
  const Folder folder("chat_long");
  const std::string path = folder.write("l.jsonl",
                                        R"({"prompt": "0123456789", "completion": "abcdefghij"})"
                                        "\n"
                                        R"({"prompt": "0123", "completion": "xy"})"
                                        "\n");
  const std::shared_ptr<const TokenSource> source =
      open_chat(path, 256, *tokenizer::byte_tokenizer());
  const WholeWindows cut(source, 14);
  CHECK((cut.count() == 2 && cut.cut_documents() == 1 && cut.left_out() == 0));
  Batch batch = make_batch(14, 1);
  cut.append(0, batch);
  CHECK(text_of_tokens(batch.tokens) == "0123456789abcd");
  CHECK(batch.labels.back() == 'e');  // the token after the window is still known
  CHECK(batch.valid_labels == 5);
  const WholeWindows rest(source, 9);
  CHECK((rest.count() == 1 && rest.left_out() == 1));
  CHECK(
      has(input_error([&] { PackedDataset(source, 1, 0, 3); }), "none of 2 records has a target"));
  // Conversations and running text do not mix in one data set.
  folder.write("t.txt", "some text that is long enough");
  CHECK_THROWS_AS(open_path(folder.path(), {}), UsageError);
}

}  // namespace moesaic::data
