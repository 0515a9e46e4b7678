// Scores of a model from a checkpoint: against a forward pass of one text at a time, against the trainer's own evaluation,
// and on several ranks.
#include "apps/eval/scorer.h"

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "tests/eval/saved_run.h"
#include "tests/support/catch.h"

namespace moesaic::apps::eval {
namespace {

using test::Held;
using test::load;
using test::Run;
using test::same_bits;
using test::Saved;

const std::string kQuestions =
    R"({"context": "one two ", "choices": ["three ", "red green blue and then ", "t"], "answer": 0}
{"context": "", "choices": ["red one", "green two "], "answer": 1}
{"context": "one red two green three blue and then one red two green three blue and then ", "choices": ["one", "blue "], "answer": 1}
{"context": "and then", "choices": [" one ", " blue", " and", " then "], "answer": 3}
)";

// log softmax of one row in f64, at one place.
double log_probability(const double* logits, std::int64_t vocabulary, std::int32_t target) {
  double top = logits[0], sum = 0;
  for (std::int64_t v = 1; v < vocabulary; ++v)
    top = std::max(top, logits[v]);
  for (std::int64_t v = 0; v < vocabulary; ++v)
    sum += std::exp(logits[v] - top);
  return logits[target] - top - std::log(sum);
}

// The score of a text by the trained model itself: all of it in a sequence of its own, and every row of logits.
double brute_force(Run& run, const ChoiceText& text) {
  const std::int64_t n = text.length(), vocabulary = run.model->head().vocabulary();
  run.model->plan({n, 0}, RecomputePolicy{});
  const Buffer slot(run.model->slot_bytes(), kCpu, "slot"),
      memory(static_cast<std::size_t>(2 * n + 2) * 4, kCpu, "sequence"),
      rows(static_cast<std::size_t>(n * vocabulary) * 8, kCpu, "logits");
  Arena transient(std::size_t{32} << 20, kCpu, "transient");
  BackendOwner owner({.device = kCpu,
                      .mode = Stream::Mode::immediate,
                      .scratch_bytes = std::size_t{32} << 20,
                      .name = "brute force"});
  const TensorView ids = memory.view({2 * n + 2}, DType::i32);
  for (std::int64_t t = 0; t < n; ++t) {
    ids.as<std::int32_t>()[t] = text.tokens[static_cast<std::size_t>(t)];
    ids.as<std::int32_t>()[n + t] = static_cast<std::int32_t>(t);
  }
  ids.as<std::int32_t>()[2 * n] = 0;
  ids.as<std::int32_t>()[2 * n + 1] = static_cast<std::int32_t>(n);
  Sequence sequence;
  sequence.tokens = ids.rows(0, n);
  sequence.positions = ids.rows(n, 2 * n);
  sequence.cu = ids.rows(2 * n, 2 * n + 2);
  WeightGradients none;
  RunContext context{owner.backend(), *run.params, transient, none, sequence, {}, {}, false, {}};
  Model::MicroBatch batch = run.model->make_micro_batch(
      slot.view({static_cast<std::int64_t>(run.model->slot_bytes())}, DType::u8));
  run.model->forward(context, batch);
  const TensorView logits = rows.view({n, vocabulary}, DType::f64);
  run.model->head().logits(context, run.model->final_hidden(batch), logits);
  double sum = 0;
  for (std::int64_t t = text.first_scored; t < n + 1; ++t)
    sum += log_probability(logits.as<double>() + (t - 1) * vocabulary,
                           vocabulary,
                           text.tokens[static_cast<std::size_t>(t)]);
  return sum;
}

LoadedModel::Window window_of(const PackedTexts& packed, std::int64_t longest) {
  return {.tokens = packed.batch_tokens(),
          .longest = std::min(longest, packed.batch_tokens()),
          .documents = packed.most_documents()};
}

}  // namespace

TEST_CASE("choices: packed into batches they score as each does alone") {
  Saved saved({});
  const auto& config = saved.run.config;
  const std::int64_t length = config.data.sequence_length;
  const ChoiceSet set("quiz", saved.questions(kQuestions), *tokenizer::byte_tokenizer(), length);
  CHECK(set.num_cut() == 1);
  CHECK(set.num_without_context() == 1);
  const auto checkpoint = saved.save();
  const PackedTexts several(set.texts(), length), one(set.texts(), 1024);
  REQUIRE(several.batches().size() > 3);
  REQUIRE(one.batches().size() == 1);
  const auto model = load(config, checkpoint, {window_of(several, length), window_of(one, length)});
  std::vector<double> logp, together;
  run_local_ranks(1, [&](Communicator& world) {
    Scorer scorer(*model, world);
    logp = scorer.score(set, several);
    together = scorer.score(set, one);
  });
  for (std::size_t i = 0; i < set.texts().size(); ++i) {
    INFO(i);
    const double alone = brute_force(saved.run, set.texts()[i]);
    CHECK(alone < -0.1);
    CHECK(std::abs(logp[i] - alone) < 1e-9);
    CHECK(std::abs(together[i] - alone) < 1e-9);
  }
}

TEST_CASE("a data set's loss is that of the trainer, bit for bit") {
  const std::vector<std::vector<std::string>> configs{
      {"run.precision=f32", "train.micro_batch_size=2"},
      {"run.precision=bf16", "optimizer.master=split"},
      {"run.precision=bf16", "optimizer.master=f32"}};
  for (const auto& overrides : configs) {
    INFO(overrides[1]);
    Saved saved(overrides);
    const EvalStats own = saved.run.trainer->evaluate(true);
    const Held held(saved.run.config);
    const auto model = load(saved.run.config, saved.save(), {held.window});
    CHECK(model->step() == 2);
    const TokenBytes bytes(*tokenizer::byte_tokenizer(), 256);
    run_local_ranks(1, [&](Communicator& world) {
      const DataScore score = Scorer(*model, world).score("text", held.windows, held.micro, &bytes);
      CHECK(score.stats.loss == own.loss);
      CHECK(score.stats.predicted_tokens == own.predicted_tokens);
      CHECK(score.perplexity() == Approx(std::exp(own.loss)));
      // Ends of documents are predicted, and are no bytes of text.
      REQUIRE(score.bytes);
      CHECK(*score.bytes < own.predicted_tokens);
      CHECK(*score.bytes > own.predicted_tokens * 9 / 10);
      CHECK(*score.bits_per_byte() == Approx(own.loss * static_cast<double>(own.predicted_tokens) /
                                             std::log(2.0) / static_cast<double>(*score.bytes)));
    });
  }
}

TEST_CASE("any number of ranks gives the same scores; averages are other weights") {
  Saved saved({"run.precision=f32", "optimizer.ema_decay=0.9"});
  const auto& config = saved.run.config;
  const ChoiceSet set("quiz",
                      saved.questions(kQuestions),
                      *tokenizer::byte_tokenizer(),
                      config.data.sequence_length);
  const auto checkpoint = saved.save();
  const PackedTexts packed(set.texts(), config.data.sequence_length);
  const Held held(config);
  struct Scores {
    std::vector<double> logp;
    double loss = 0;
  };
  const auto score = [&](int ranks, bool average) {
    std::vector<Scores> all(static_cast<std::size_t>(ranks));
    run_local_ranks(ranks, [&](Communicator& world) {
      const auto model = load(config,
                              checkpoint,
                              {held.window, window_of(packed, config.data.sequence_length)},
                              average);
      Scorer scorer(*model, world);
      Scores& own = all[static_cast<std::size_t>(world.rank())];
      own.logp = scorer.score(set, packed);
      own.loss = scorer.score("text", held.windows, held.micro, nullptr).stats.loss;
    });
    for (const Scores& s : all) {
      CHECK(same_bits(s.logp, all[0].logp));
      CHECK(s.loss == all[0].loss);
    }
    return all[0];
  };
  const Scores alone = score(1, false), three = score(3, false), averaged = score(1, true);
  CHECK(same_bits(alone.logp, three.logp));
  CHECK(alone.loss == three.loss);
  CHECK_FALSE(same_bits(alone.logp, averaged.logp));
  CHECK(alone.loss != averaged.loss);
}

TEST_CASE("weights that are not finite are said to be") {
  Saved saved({"run.precision=f32"});
  const auto& config = saved.run.config;
  const ChoiceSet set("quiz",
                      saved.questions(kQuestions),
                      *tokenizer::byte_tokenizer(),
                      config.data.sequence_length);
  const TensorView broken = saved.run.params->master({0}, 0);
  for (std::int64_t i = 0; i < broken.numel(); ++i)
    broken.as<float>()[i] = std::numeric_limits<float>::quiet_NaN();
  const PackedTexts packed(set.texts(), config.data.sequence_length);
  const Held held(config);
  const auto model =
      load(config, saved.save(), {held.window, window_of(packed, config.data.sequence_length)});
  run_local_ranks(1, [&](Communicator& world) {
    Scorer scorer(*model, world);
    std::string message;
    try {
      scorer.score(set, packed);
    } catch (const NumericsError& error) {
      message = error.what();
    }
    INFO(message);
    CHECK(message.find("quiz.jsonl:1: the log-probability of choice 0 is nan") !=
          std::string::npos);
    CHECK_THROWS_AS(scorer.score("text", held.windows, held.micro, nullptr), NumericsError);
  });
}

TEST_CASE("averages that a run did not keep cannot be used") {
  Saved saved({"run.precision=f32"}, 1);
  CHECK_THROWS_AS(load(saved.run.config, saved.save(), {{.tokens = 64, .longest = 64}}, true),
                  UsageError);
}

}  // namespace moesaic::apps::eval
