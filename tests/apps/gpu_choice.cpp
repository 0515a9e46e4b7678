// Which GPU a rank takes, whatever its launcher shows it.
#include "apps/gpu_choice.h"

#include <set>

#include "comm/machine_identity.h"
#include "tests/support/catch.h"

namespace moesaic::apps {
namespace {

std::vector<int> numbers(const VisibleGpus& visible, bool share = false) {
  return choose_gpus(visible, share).numbers;
}

bool names(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("ranks that see the same GPUs take them in order, on every machine anew") {
  const std::vector<std::string> first{"a", "b", "c"}, second{"x", "y", "z"};
  CHECK(numbers({first, first, first, second, second, second}) ==
        std::vector<int>{0, 1, 2, 0, 1, 2});
  CHECK(numbers({first, second, first, second}) == std::vector<int>{0, 0, 1, 1});
  CHECK(numbers({{"a"}}) == std::vector<int>{0});
}

TEST_CASE("a rank whose launcher shows it one GPU, or some, as number 0 takes that one") {
  CHECK(numbers({{"a"}, {"b"}, {"c"}, {"d"}}) == std::vector<int>{0, 0, 0, 0});
  CHECK(numbers({{"a", "b"}, {"c", "d"}}) == std::vector<int>{0, 0});
  // --gpu-bind=closest: two ranks per socket, each with the GPUs of its socket.
  CHECK(numbers({{"a", "b"}, {"a", "b"}, {"c", "d"}, {"c", "d"}}) == std::vector<int>{0, 1, 0, 1});
  // The same devices under other numbers.
  CHECK(numbers({{"a", "b"}, {"b", "a"}}) == std::vector<int>{0, 0});
}

TEST_CASE("ranks give way where only that leaves one for each") {
  // Rank 0 would take a, which is all that rank 1 sees, and so on along the chain.
  const VisibleGpus chain{{"a", "b"}, {"a"}, {"b", "c"}};
  const GpuChoice choice = choose_gpus(chain, false);
  CHECK(choice.first_without == -1);
  std::set<std::string> taken;
  for (std::size_t r = 0; r < chain.size(); ++r)
    taken.insert(chain[r][static_cast<std::size_t>(choice.numbers[r])]);
  CHECK(taken.size() == 3);
  CHECK(gpu_choice_problem(chain, choice).empty());
}

TEST_CASE("too few GPUs, or none for a rank, is said with what it sees") {
  const VisibleGpus one{{"GPU-1"}, {"GPU-1"}};
  const GpuChoice alone = choose_gpus(one, false);
  CHECK(alone.numbers == std::vector<int>{0, -1});
  const std::string text = gpu_choice_problem(one, alone);
  INFO(text);
  CHECK(names(text, "2 ranks see 1 different GPU(s)"));
  CHECK(names(text, "rank 1 finds none that no other rank uses (it sees GPU-1)"));
  CHECK(names(text, "use run.device=cpu, or set comm.share_gpu=true"));
  CHECK(names(gpu_choice_problem(one, alone, {.cpu = "--device cpu", .share = "--share-gpu"}),
              "use --device cpu, or set --share-gpu to let ranks take turns"));
  const VisibleGpus blind{{"GPU-1"}, {}};
  const std::string none = gpu_choice_problem(blind, choose_gpus(blind, true));
  INFO(none);
  CHECK(names(none, "rank 1 sees none"));
}

TEST_CASE("ranks that may share GPUs are spread evenly") {
  const std::vector<std::string> two{"a", "b"};
  CHECK(numbers({two, two, two, two, two}, true) == std::vector<int>{0, 1, 0, 1, 0});
  CHECK(numbers({{"a"}, {"a"}, {"a"}}, true) == std::vector<int>{0, 0, 0});
  CHECK(numbers({two, {"a"}, two}, true) == std::vector<int>{1, 0, 0});
}

TEST_CASE("ranks that pose as nodes of a machine have each GPU once per node") {
  const std::vector<std::string> two{"a", "b"}, three{"a", "b", "c"};
  const auto posed = [](const VisibleGpus& visible, int ranks_per_node) {
    const std::vector<int> chosen = numbers(visible, true);
    std::vector<RankSite> sites;
    for (std::size_t r = 0; r < visible.size(); ++r)
      sites.push_back({"m", visible[r][static_cast<std::size_t>(chosen[r])]});
    std::set<std::string> machines;
    const auto identities = machine_identities(sites, ranks_per_node, true);
    for (std::size_t r = 0; r < sites.size(); ++r) {
      // All of a node are on the machine of its first rank.
      CHECK(identities[r] == identities[r / static_cast<std::size_t>(ranks_per_node) *
                                        static_cast<std::size_t>(ranks_per_node)]);
      machines.insert(identities[r]);
    }
    CHECK(machines.size() * static_cast<std::size_t>(ranks_per_node) == sites.size());
    return chosen;
  };
  CHECK(posed({two, two, two, two}, 2) == std::vector<int>{0, 1, 0, 1});
  CHECK(posed({two, two, two, two}, 1) == std::vector<int>{0, 1, 0, 1});
  CHECK(posed({two, two, two, two, two, two, two, two}, 2) ==
        std::vector<int>{0, 1, 0, 1, 0, 1, 0, 1});
  CHECK(posed({three, three, three, three, three, three}, 2) == std::vector<int>{0, 1, 2, 0, 1, 2});
}

TEST_CASE("whether the ranks of a machine see the same is told from the lists") {
  const std::vector<std::string> one{"m", "m"}, two{"m", "n"};
  CHECK(is_alike_on_machines({{"a", "b"}, {"a", "b"}}, one));
  CHECK(is_alike_on_machines({{"a"}, {"b"}}, two));
  CHECK_FALSE(is_alike_on_machines({{"a"}, {"b"}}, one));
  CHECK_FALSE(is_alike_on_machines({{"a", "b"}, {"b", "a"}}, one));
}

}  // namespace moesaic::apps
