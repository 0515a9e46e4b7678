// Which ranks meet through device memory and which through the network, where some share a device.
#include "comm/machine_identity.h"

#include "tests/support/catch.h"

namespace moesaic {
namespace {

// One machine; the device of each rank.
std::vector<RankSite> on_devices(const std::string& devices, const std::string& host = "m") {
  std::vector<RankSite> ranks;
  for (const char d : devices)
    ranks.push_back({host, std::string(1, d)});
  return ranks;
}

// The machines as letters, in the order in which they come.
std::string letters(const std::vector<std::string>& identities) {
  std::vector<std::string> seen;
  std::string text;
  for (const std::string& identity : identities) {
    std::size_t i = 0;
    while (i < seen.size() && seen[i] != identity)
      ++i;
    if (i == seen.size()) seen.push_back(identity);
    text += static_cast<char>('a' + i);
  }
  return text;
}
std::string machines(const std::string& devices, int ranks_per_node, bool may_share = true) {
  return letters(machine_identities(on_devices(devices), ranks_per_node, may_share));
}

}  // namespace

TEST_CASE("ranks with a device each keep their machine") {
  for (const bool may_share : {false, true}) {
    for (const std::string& identity : machine_identities(on_devices("0123"), 0, may_share))
      CHECK(identity.empty());
    for (const std::string& identity : machine_identities(on_devices("0123"), 4, may_share))
      CHECK(identity.empty());
  }
  // A description of real nodes, in a run that does not play: the fast way stays.
  for (const std::string& identity : machine_identities(on_devices("0123"), 2, false))
    CHECK(identity.empty());
}

TEST_CASE("ranks that share a device are on different machines") {
  CHECK(machines("0101", 0) == "aabb");
  CHECK(machines("0011", 0) == "abab");
  CHECK(machines("000", 0) == "abc");
  for (const std::string& identity : machine_identities(on_devices("0101"), 0, true))
    CHECK_FALSE(identity.empty());
}

TEST_CASE("posed nodes are machines") {
  CHECK(machines("0101", 2) == "aabb");
  CHECK(machines("0101", 1) == "abcd");
  CHECK(machines("01010101", 2) == "aabbccdd");
  CHECK(machines("0123", 2) == "aabb");  // with devices of their own, too
  CHECK(machines("01", 1) == "ab");
  // No node of four has four devices: the second ranks of a device meet the others through the network.
  CHECK(machines("01010101", 4) == "aabbccdd");
  CHECK(machines("0101", 4) == "aabb");
  CHECK(machines("00", 2) == "ab");
}

TEST_CASE("real machines are never one") {
  std::vector<RankSite> ranks = on_devices("0101", "m");
  for (const RankSite& r : on_devices("0101", "n"))
    ranks.push_back(r);
  CHECK(letters(machine_identities(ranks, 2, true)) == "aabbccdd");
  CHECK(letters(machine_identities(ranks, 0, true)) == "aabbccdd");
  // A posed node on two machines is two.
  const std::vector<RankSite> across{{"m", "0"}, {"n", "0"}, {"m", "0"}, {"n", "0"}};
  CHECK(letters(machine_identities(across, 2, true)) == "abcd");
}

}  // namespace moesaic
