// Steps, phases and batches that follow from counts of tokens.
#include "core/config/phase_extent.h"

#include "core/config/load.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

namespace moesaic {
namespace {

using config::PhaseExtent;
using namespace config_tests;

// kTiny without its section train.
std::string bare(const std::string& train) {
  std::string text = kTiny;
  const std::size_t at = text.find("train: {steps");
  return text.replace(at, text.find('\n', at) - at, "train: " + train);
}

std::vector<PhaseExtent> extents(const std::string& train) {
  return config::phase_extents(config::load_config_text(bare(train), "t.yaml").config);
}

}  // namespace

TEST_CASE("phases by tokens hold the tokens of a step and end with the step that reaches theirs") {
  const auto p = extents(
      "{global_batch_tokens: 1024, tokens: 100_000, phases: [{until_tokens: 10_000}, "
      "{until_tokens: "
      "10_241, sequence_length: 256, micro_batch_size: 2}, {until: 40, sequence_length: 512}, "
      "{sequence_length: 1024}]}");
  REQUIRE(p.size() == 4);
  CHECK((p[0].begin == 0 &&
         p[0].until == 10));  // 10 steps are 10,240 tokens, 9 are fewer than 10,000
  CHECK((p[1].begin == 10 && p[1].until == 11));  // one token more needs one step more
  CHECK((p[2].begin == 11 && p[2].until == 40));
  CHECK((p[3].begin == 40 && p[3].until == 98));  // 98 x 1024 = 100,352
  CHECK((p[0].global_batch_size == 16 && p[1].global_batch_size == 4 &&
         p[2].global_batch_size == 2 && p[3].global_batch_size == 1));
  CHECK((p[0].micro_batch_size == 1 && p[1].micro_batch_size == 2));
  for (const PhaseExtent& e : p)
    CHECK(e.tokens_per_step() == 1024);
  CHECK((p[1].first_token == 10240 && p[3].first_token == 40960 && p[3].end_token() == 100352));
  // The sizes of real runs, exactly.
  const auto large = extents(
      "{global_batch_tokens: 4_194_304, phases: [{until_tokens: 12e12, sequence_length: 8}, "
      "{until_tokens: 15e12, sequence_length: 4096}]}");
  CHECK(large[0].until == (12'000'000'000'000 + 4194303) / 4194304);
  CHECK(large[1].until == (15'000'000'000'000 + 4194303) / 4194304);
  CHECK(large[1].first_token == large[0].until * 4194304);
}

TEST_CASE("without tokens everything is as it was written") {
  const auto plain = extents("{steps: 10, global_batch_size: 4}");
  REQUIRE(plain.size() == 1);
  CHECK((plain[0].until == 10 && plain[0].global_batch_size == 4 &&
         plain[0].tokens_per_step() == 256));
  const auto staged = extents(
      "{steps: 10, global_batch_size: 4, phases: [{until: 4}, {sequence_length: 128, "
      "global_batch_size: "
      "6}]}");
  CHECK((staged[0].global_batch_size == 4 && staged[1].global_batch_size == 6 &&
         staged[1].until == 10));
  const auto taken_away = config::load_config_text(kTiny,
                                                   "t.yaml",
                                                   {"train.steps=null",
                                                    "train.tokens=1000",
                                                    "train.global_batch_size=null",
                                                    "train.global_batch_tokens=128"});
  CHECK((taken_away.config.train.steps == 8 && taken_away.config.train.global_batch_size == 2));
  CHECK(extents("{tokens: 1000, global_batch_size: 4}")[0].until == 4);  // 3.9 steps
}

TEST_CASE("tokens that contradict each other or divide nothing are refused") {
  const auto report = [](const std::string& train) { return report_of(bare(train)); };
  CHECK(contains(report("{}"), "train.steps: is required (or train.tokens)"));
  CHECK(contains(report("{}"),
                 "train.global_batch_size: is required (or train.global_batch_tokens)"));
  CHECK(contains(
      report("{steps: 3, global_batch_tokens: 100}"),
      "data.sequence_length: train.global_batch_tokens (100) is no multiple of sequences of 64 "
      "tokens. Nearest valid: 64, 128"));
  CHECK(
      contains(report("{steps: 3, global_batch_tokens: 128, phases: [{sequence_length: 96}]}"),
               "train.phases[0].sequence_length: train.global_batch_tokens (128) is no multiple"));
  CHECK(contains(report("{steps: 3, global_batch_tokens: 128, global_batch_size: 4}"),
                 "train.global_batch_tokens (128) makes 2 sequences"));
  CHECK(report("{steps: 3, global_batch_tokens: 128, global_batch_size: 2}").empty());
  CHECK(contains(report("{steps: 3, global_batch_tokens: 128, phases: [{global_batch_size: 2}]}"),
                 "train.phases[0].global_batch_size: train.global_batch_tokens decides it"));
  CHECK(contains(report("{steps: 3, tokens: 1000, global_batch_size: 4}"), "makes 4 steps"));
  CHECK(contains(report("{steps: 9, global_batch_size: 4, phases: [{}, {until: 9}]}"),
                 "train.phases[0].until: is required (or until_tokens)"));
  CHECK(contains(report("{global_batch_size: 4, phases: [{until: 9}, {}]}"),
                 "train.steps: is required"));
  CHECK(contains(
      report("{steps: 9, global_batch_size: 4, phases: [{until: 4}, {until_tokens: 1024}]}"),
      "train.phases[1].until_tokens: found 1024, but 1024 tokens have been seen"));
  CHECK(contains(report("{global_batch_size: 4, phases: [{until: 4, until_tokens: 1000000}]}"),
                 "found 4, but until_tokens (1000000) is step 3907"));
  CHECK(contains(
      report("{global_batch_size: 4, tokens: 1024, phases: [{until: 4}, {until: 9}]}"),
      "train.tokens: found 1024, but 1024 tokens have been seen when the last phase begins"));
  CHECK(contains(report("{steps: 3, global_batch_tokens: 512, phases: [{micro_batch_size: 3}]}"),
                 "train.phases[0].global_batch_size: 8 is not divisible by micro_batch_size (3)"));
  CHECK(contains(report("{steps: 3, global_batch_size: 1e12}"),
                 "a step of 1000000000000 sequences") == false);
  CHECK(contains(report("{steps: 0, global_batch_size: 4}"), "train.steps: found 0"));
}

TEST_CASE("what follows from other keys is printed as a comment and followed anew") {
  const auto first = config::load_config_text(
      bare("{global_batch_tokens: 1024, phases: [{until_tokens: 4000}, {until_tokens: 9000}]}"),
      "t.yaml");
  const std::string text = config::effective_yaml(first);
  CHECK(contains(text, "  # steps: 9  # follows from other keys\n"));
  CHECK(contains(text, "  # global_batch_size: 16  # follows from other keys\n"));
  CHECK(contains(text, "    - # until: 4  # follows from other keys\n      until_tokens: 4000"));
  const auto again =
      config::load_config_text(text, "u.yaml", {"train.phases[1].until_tokens=20_000"});
  CHECK(again.config.train.phases[0].until == 4);
  CHECK(again.config.train.steps == 20);
}

}  // namespace moesaic
