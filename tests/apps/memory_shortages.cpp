// One message of what several ranks lack.
#include "apps/memory_shortages.h"

#include "tests/support/catch.h"

namespace moesaic::apps {
namespace {

using Where = MemoryShortage::Where;

std::string stage(int i) {
  return "stage " + std::to_string(i);
}

TEST_CASE("memory shortages: the largest need is told, of the device and of the host") {
  CHECK(!largest({}, stage));
  CHECK(!largest({std::nullopt, std::nullopt}, stage));
  const MemoryShortage small(Where::device, 5, "5 needed"), large(Where::device, 70, "70 needed"),
      host(Where::host, 900, "900 needed there");
  {
    const Shortage most = largest({small, std::nullopt, large, small}, stage);
    REQUIRE(most);
    CHECK(most->needed() == 70);
    CHECK(std::string(most->what()) == "stage 2: 70 needed");
    CHECK(most->exit_code() == ExitCode::resource);
  }
  // The same of all, so that nobody has to be named.
  CHECK(std::string(largest({large, large}, stage)->what()) == "70 needed");
  CHECK(std::string(largest({large}, stage)->what()) == "70 needed");
  CHECK(std::string(largest({large, std::nullopt}, stage)->what()) == "stage 0: 70 needed");
  // More memory of one kind would not be enough.
  const Shortage both = largest({host, large}, stage);
  CHECK(both->where() == Where::device);
  CHECK(std::string(both->what()) == "stage 1: 70 needed\nstage 0: 900 needed there");
  CHECK(largest({std::nullopt, host}, stage)->where() == Where::host);
}

TEST_CASE("memory shortages: they travel between ranks") {
  CHECK(packed(std::nullopt).empty());
  CHECK(!unpacked_shortage(""));
  const MemoryShortage lack(Where::host, (std::uint64_t{1} << 63) + 1, " 12 lines\nand a blank ");
  const Shortage back = unpacked_shortage(packed(lack));
  REQUIRE(back);
  CHECK(back->where() == lack.where());
  CHECK(back->needed() == lack.needed());
  CHECK(std::string(back->what()) == lack.what());
}

TEST_CASE("memory shortages: all ranks throw the largest one of any of them") {
  const auto rank = [](int i) { return "rank " + std::to_string(i); };
  std::vector<std::string> heard(3);
  run_local_ranks(3, [&](Communicator& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    plan_on_all_ranks(
        world, [] {}, rank);
    try {
      plan_on_all_ranks(
          world,
          [&] {
            if (me > 0) throw MemoryShortage(Where::host, me, std::to_string(me) + " needed");
          },
          rank);
    } catch (const MemoryShortage& e) {
      heard[me] = e.what();
    }
  });
  CHECK(heard == std::vector<std::string>(3, "rank 2: 2 needed"));
}

}  // namespace
}  // namespace moesaic::apps
