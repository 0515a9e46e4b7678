// A checkpoint that was written in one layout is loaded in every other and written again: the same bits.
#include <filesystem>
#include <mutex>

#include <fmt/format.h>

#include "core/checkpoint/checkpoint.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

struct Layout {
  int ranks = 1, ep = 1, zero = 1;
};
constexpr Layout kLayouts[] = {
    {1, 1, 1}, {2, 1, 0}, {2, 2, 1}, {3, 1, 1}, {4, 2, 0}, {4, 2, 1}, {4, 4, 1}};

std::string name(const Layout& layout) {
  return fmt::format("{} rank(s) ep {} zero {}", layout.ranks, layout.ep, layout.zero);
}

config::Config in_layout(std::vector<std::string> overrides, const Layout& layout) {
  overrides.push_back(fmt::format("parallel.ep={}", layout.ep));
  overrides.push_back(fmt::format("parallel.zero={}", layout.zero));
  return hybrid_config(overrides);
}

// What one rank reads from a checkpoint, which must hold exactly what a run of one rank would write.
Snapshot contents(const std::vector<std::string>& overrides, const std::filesystem::path& folder) {
  Run run(in_layout(overrides, {}));
  load_newest(run, folder);
  return run.snapshot();
}

// What the kernels of all ranks read, once per name; names of which two ranks see other bytes are put into `wrong`.
void merge(Snapshot& all, const Snapshot& own, std::string& wrong, std::mutex& mutex) {
  const std::lock_guard lock(mutex);
  for (const auto& [tensor, bytes] : own) {
    const auto [known, is_new] = all.emplace(tensor, bytes);
    if (!is_new && known->second != bytes) wrong += tensor + " ";
  }
}

void check_all_layouts(const std::vector<std::string>& overrides) {
  const TemporaryFolder folder("layout_checkpoints");
  for (const Layout& from : kLayouts) {
    const auto saved = folder.path() / name(from);
    Snapshot memory, weights;
    std::string wrong;
    std::mutex mutex;
    run_local_ranks(from.ranks, [&](Communicator& world) {
      Run run(in_layout(overrides, from), &world);
      run.steps(2);
      run.add_to(memory, mutex);
      merge(weights, run.weights_of_kernels(), wrong, mutex);
      save_together(run, world, saved);
    });
    const Snapshot written = contents(overrides, saved);
    INFO("saved by " << name(from));
    CHECK(differences(written, memory).empty());
    for (const Layout& to : kLayouts) {
      INFO("loaded by " << name(to));
      const auto again = folder.path() / (name(from) + " to " + name(to));
      Snapshot loaded;
      run_local_ranks(to.ranks, [&](Communicator& world) {
        Run run(in_layout(overrides, to), &world);
        load_newest(run, saved);
        run.add_to(loaded, mutex);
        merge(weights, run.weights_of_kernels(), wrong, mutex);
        save_together(run, world, again);
      });
      CHECK(differences(loaded, memory).empty());
      CHECK(wrong.empty());
      CHECK(differences(contents(overrides, again), written).empty());
    }
  }
}

}  // namespace

TEST_CASE("checkpoints: every layout loads every other's to the bit, AdamW, f64") {
  check_all_layouts({"train.global_batch_size=12", "optimizer.ema_decay=0.9"});
}

TEST_CASE("checkpoints: every layout loads every other's to the bit, Muon, split masters") {
  check_all_layouts({"train.global_batch_size=12",
                     "optimizer.name=muon",
                     "run.precision=bf16",
                     "model.indexer.attention_form=gather"});
}

}  // namespace moesaic::test
