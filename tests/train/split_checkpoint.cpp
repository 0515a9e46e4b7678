// Checkpoints of models whose tensors are split over ranks: written by all of them, the same state in every layout.
#include <filesystem>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

config::Config split_config(int tp, std::vector<std::string> overrides) {
  overrides.push_back("parallel.tp=" + std::to_string(tp));
  return hybrid_config(overrides);
}

// Through files from a layout to another and back: no bit changes.
void check_there_and_back(int tp, int other, const std::vector<std::string>& overrides) {
  const TemporaryFolder folder("split_checkpoint");
  const auto first = folder.path() / "first", second = folder.path() / "second";
  std::vector<Snapshot> saved(static_cast<std::size_t>(tp)), back(saved.size());
  run_local_ranks(tp, [&](Communicator& world) {
    Run run(split_config(tp, overrides), &world);
    run.steps(2);
    save_together(run, world, first);
    saved[static_cast<std::size_t>(world.rank())] = run.snapshot();
  });
  run_local_ranks(other, [&](Communicator& world) {
    Run run(split_config(other, overrides), &world);
    load_newest(run, first);
    save_together(run, world, second);
  });
  run_local_ranks(tp, [&](Communicator& world) {
    Run run(split_config(tp, overrides), &world);
    load_newest(run, second);
    back[static_cast<std::size_t>(world.rank())] = run.snapshot();
  });
  for (std::size_t r = 0; r < saved.size(); ++r) {
    INFO("rank " << r << " of " << tp << ", by way of " << other);
    CHECK(differences(saved[r], back[r]).empty());
  }
  verify_checkpoint(latest_checkpoint(second)->path);
}

}  // namespace

TEST_CASE("checkpoints go from a split model to a whole one and back to the bit") {
  check_there_and_back(2, 1, {"optimizer.name=muon", "optimizer.ema_decay=0.9"});
  check_there_and_back(1, 2, {"optimizer.name=adamw", "model.tie_word_embeddings=true"});
  check_there_and_back(
      4, 2, {"model.num_attention_heads=4", "model.linear_attn_config.num_heads=4"});
}

TEST_CASE("a split vocabulary is stored whole, and a rank holds only its part of it") {
  std::vector<std::size_t> bytes(3);
  for (const int tp : {1, 2}) {
    run_local_ranks(tp, [&](Communicator& world) {
      Run run(split_config(tp, {}), &world);
      for (const StateTensor& t : run.trainer->state()) {
        if (t.name.find("embed_tokens") == std::string::npos &&
            t.name.find("lm_head") == std::string::npos)
          continue;
        MOESAIC_CHECK(t.whole() == (Shape{256, 32}), "another tensor: " + t.name);
        MOESAIC_CHECK(t.view.shape() == (Shape{256 / tp, 32}), "not this rank's part: " + t.name);
        if (world.rank() == 0) bytes[static_cast<std::size_t>(tp)] += t.bytes();
      }
    });
  }
  CHECK(bytes[1] == 2 * 3 * 256 * 32 * 8);  // two tensors, each with two moments, f64
  CHECK(bytes[2] * 2 == bytes[1]);
}

}  // namespace moesaic::test
