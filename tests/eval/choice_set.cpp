// Questions as tokens and as packed batches, and what scores make of them.
#include "apps/eval/choice_set.h"

#include <cmath>
#include <filesystem>
#include <fstream>

#include <unistd.h>

#include "apps/eval/choice_score.h"
#include "core/base/error.h"
#include "core/data/token_source.h"
#include "tests/support/catch.h"

namespace moesaic::apps::eval {
namespace {

// Bytes, but "ab" is one token, which may reach from a context into a choice.
class PairTokenizer final : public tokenizer::Tokenizer {
 public:
  static constexpr std::int32_t kPair = 256;
  class PairEncoder final : public tokenizer::Encoder {
   public:
    void encode(std::string_view text, std::vector<std::int32_t>& out) override {
      for (std::size_t i = 0; i < text.size(); ++i) {
        const bool pair = text.substr(i, 2) == "ab";
        out.push_back(pair ? kPair : static_cast<unsigned char>(text[i]));
        i += pair ? 1 : 0;
      }
    }
  };
  std::unique_ptr<tokenizer::Encoder> encoder(const tokenizer::EncodeOptions&) const override {
    return std::make_unique<PairEncoder>();
  }
  std::string decode(std::span<const std::int32_t>, bool) const override { return ""; }
  std::int64_t vocab_size() const noexcept override { return 257; }
  const std::vector<tokenizer::NamedToken>& named_tokens() const noexcept override {
    return named_;
  }
  std::optional<std::int32_t> end_of_text() const noexcept override { return std::nullopt; }
  const std::string& name() const noexcept override { return name_; }
  const std::string& content_hash() const noexcept override { return name_; }

 private:
  std::vector<tokenizer::NamedToken> named_;
  std::string name_ = "pairs";
};

// A file that is gone with this object.
class QuestionFile {
 public:
  explicit QuestionFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic_choices_" + std::to_string(getpid()) + ".jsonl")) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~QuestionFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

ChoiceSet set_of(const std::string& text, std::int64_t window) {
  const QuestionFile file(text);
  return {"quiz", file.path(), PairTokenizer(), window};
}

std::string refusal(const std::string& text, std::int64_t window) {
  try {
    set_of(text, window);
  } catch (const InputError& error) {
    const std::string what = error.what();
    return what.substr(what.find(".jsonl") + 6);
  }
  return "accepted";
}

using Tokens = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("choices as tokens: where a choice begins, what is cut, what is given") {
  // Empty lines count as lines; the last line needs no end.
  const ChoiceSet set = set_of(
      "{\"context\": \"xyza\", \"choices\": [\"cd\", \"bc\"], \"answer\": 1}\r\n\n"
      "{\"context\": \"\", \"choices\": [\"cd\", \"ce\"], \"answer\": 0}\n"
      "{\"context\": \"0123456789\", \"choices\": [\"cd\", \"c\"], \"answer\": 0}",
      6);
  REQUIRE(set.questions().size() == 3);
  REQUIRE(set.texts().size() == 6);
  CHECK(set.questions()[0].line == 1);
  CHECK(set.questions()[1].line == 3);
  CHECK(set.questions()[2].line == 4);
  CHECK(set.questions()[1].first == 2);
  CHECK(set.texts()[0].tokens == Tokens{'x', 'y', 'z', 'a', 'c', 'd'});
  CHECK(set.texts()[0].first_scored == 4);
  // The token "ab" is the choice's, although its first half was the context's.
  CHECK(set.texts()[1].tokens == Tokens{'x', 'y', 'z', PairTokenizer::kPair, 'c'});
  CHECK(set.texts()[1].first_scored == 3);
  CHECK(set.texts()[1].scored() == 2);
  CHECK(set.texts()[1].bytes == 2);
  // Nothing predicts the first token of a document.
  CHECK(set.texts()[2].first_scored == 1);
  CHECK(set.texts()[2].scored() == 1);
  CHECK(set.num_without_context() == 1);
  // A window of 6 reads 6 tokens and predicts a seventh.
  CHECK(set.texts()[4].tokens == Tokens{'5', '6', '7', '8', '9', 'c', 'd'});
  CHECK(set.texts()[4].first_scored == 5);
  CHECK(set.texts()[5].tokens == Tokens{'4', '5', '6', '7', '8', '9', 'c'});
  CHECK(set.num_cut() == 1);
  CHECK_FALSE(set.questions()[0].cut);
}

TEST_CASE("choices as tokens: what cannot be scored is refused with file and line") {
  const std::string good = "{\"context\": \"x\", \"choices\": [\"a\", \"b\"], \"answer\": 0}\n";
  CHECK(refusal("", 8).find("an empty file") != std::string::npos);
  CHECK(refusal(" \n\n", 8).find("no records") != std::string::npos);
  CHECK(refusal(good + "\n{}", 8).rfind(":3: no \"context\"", 0) == 0);
  CHECK(refusal(good + "{\"context\": \"\", \"choices\": [\"xy\", \"a\"], \"answer\": 0}", 8)
            .rfind(":2: choice 1: one token with nothing before it", 0) == 0);
  // Exactly as many as the window predicts, and one more.
  CHECK(refusal("{\"context\": \"x\", \"choices\": [\"cdef\", \"b\"], \"answer\": 0}", 4) ==
        "accepted");
  CHECK(refusal("{\"context\": \"x\", \"choices\": [\"b\", \"cdefg\"], \"answer\": 0}", 4)
            .rfind(":1: choice 1: 5 tokens, of which the model can predict 4 at once", 0) == 0);
  CHECK_THROWS_AS(ChoiceSet("quiz", "/nowhere/q.jsonl", PairTokenizer(), 4), InputError);
}

TEST_CASE("packed texts: every text once, whole, with its own labels") {
  std::string text;
  for (int i = 0; i < 40; ++i)
    text += "{\"context\": \"" + std::string(static_cast<std::size_t>(1 + i % 9), 'x') +
            "\", \"choices\": [\"yz\", \"" + std::string(static_cast<std::size_t>(1 + i % 5), 'w') +
            "\"], \"answer\": 0}\n";
  const ChoiceSet set = set_of(text, 16);
  const PackedTexts packed(set.texts(), 40);
  CHECK(packed.batch_tokens() == 40);
  REQUIRE(packed.batches().size() > 3);
  std::size_t next = 0;
  for (const TextRange& range : packed.batches()) {
    CHECK(range.first == next);
    next = range.last;
    const data::Batch batch = packed.batch(range);
    REQUIRE(batch.tokens.size() == 40);
    REQUIRE(batch.labels.size() == 40);
    REQUIRE(batch.positions.size() == 40);
    CHECK(batch.cu.back() == 40);
    CHECK(static_cast<std::int64_t>(batch.cu.size()) - 1 <= packed.most_documents());
    std::int64_t labels = 0;
    for (std::size_t i = range.first; i < range.last; ++i) {
      const ChoiceText& t = set.texts()[i];
      const auto begin = static_cast<std::size_t>(batch.cu[i - range.first]);
      REQUIRE(batch.cu[i - range.first + 1] - batch.cu[i - range.first] == t.length());
      for (std::size_t k = 0; k < static_cast<std::size_t>(t.length()); ++k) {
        CHECK(batch.tokens[begin + k] == t.tokens[k]);
        CHECK(batch.positions[begin + k] == static_cast<std::int32_t>(k));
        const bool scored = static_cast<std::int64_t>(k) + 1 >= t.first_scored;
        CHECK(batch.labels[begin + k] == (scored ? t.tokens[k + 1] : data::kIgnoredLabel));
      }
      labels += t.scored();
    }
    CHECK(batch.valid_labels == labels);
  }
  CHECK(next == set.texts().size());
  // All of them in one batch: no larger than it must be.
  CHECK(PackedTexts(set.texts(), 4096).batches().size() == 1);
  CHECK(PackedTexts(set.texts(), 4096).batch_tokens() < 1024);
}

TEST_CASE("scores of choices: accuracy, its error, length, ties") {
  const ChoiceSet set = set_of(
      "{\"context\": \"x\", \"choices\": [\"c\", \"ddd\"], \"answer\": 1}\n"
      "{\"context\": \"x\", \"choices\": [\"c\", \"d\", \"e\", \"f\"], \"answer\": 2}\n"
      "{\"context\": \"x\", \"choices\": [\"cc\", \"dd\"], \"answer\": 1}\n",
      16);
  // By sum the first of question 1, by byte the second; question 3 is a tie.
  const std::vector<double> logp{-2, -3, -4, -3, -1, -2, -5, -5};
  const ChoiceScore score = score_of_choices(set, logp);
  CHECK(score.questions == 3);
  CHECK(score.acc == Approx(1.0 / 3));
  CHECK(score.acc_norm == Approx(2.0 / 3));
  REQUIRE(score.acc_stderr);
  CHECK(*score.acc_stderr == Approx(std::sqrt((1.0 / 3) * (2.0 / 3) / 2)));
  CHECK(*score.acc_norm_stderr == Approx(std::sqrt((1.0 / 3) * (2.0 / 3) / 2)));
  CHECK(score.chance == Approx((0.5 + 0.25 + 0.5) / 3));
  CHECK(score.answer_loss == Approx((3.0 + 1 + 5) / (3 + 1 + 2)));
  const ChoiceSet one =
      set_of("{\"context\": \"x\", \"choices\": [\"c\", \"d\"], \"answer\": 0}", 16);
  const std::vector<double> sure{-1, -2};
  CHECK_FALSE(score_of_choices(one, sure).acc_stderr);
  CHECK(score_of_choices(one, sure).acc == 1);
}

}  // namespace moesaic::apps::eval
