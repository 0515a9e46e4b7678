// Cases about groups: splits in several orders, and operations of several groups on several streams.
#include <functional>
#include <memory>

#include "core/base/random.h"
#include "tests/comm/conformance_support.h"

namespace moesaic::test {
namespace {

// Sum of rank numbers over the members of a group, by an operation in it.
std::int64_t sum_of_ranks(Communicator& group, int world_rank, Device device) {
  Stream stream(device, "test");
  Values<std::int64_t> v({world_rank}, device);
  group.all_reduce(v.view(), ReduceOp::sum, stream);
  stream.synchronize();
  return v.get()[0];
}
std::int64_t expected_sum(Communicator& comm, const std::function<bool(int)>& is_member) {
  std::int64_t sum = 0;
  for (int r = 0; r < comm.size(); ++r)
    sum += is_member(r) ? r : 0;
  return sum;
}

// Nodes of two ranks and rails across them, made in one order and in the other, from the world and from each other.
void splits_in_several_orders(Communicator& comm, Device device) {
  const int rank = comm.rank(), node = rank / 2, rail = rank % 2;
  const auto in_node = [&](int r) { return r / 2 == node; };
  const auto on_rail = [&](int r) { return r % 2 == rail; };
  for (int order = 0; order < 2; ++order) {
    std::unique_ptr<Communicator> nodes, rails;
    if (order == 0) nodes = comm.split(node, rank);
    rails = comm.split(rail, rank);
    if (order == 1) nodes = comm.split(node, rank);
    // Used in another order than they were made in, and more than once.
    for (int round = 0; round < 2; ++round) {
      expect(sum_of_ranks(*rails, rank, device) == expected_sum(comm, on_rail), "sum of a rail");
      expect(sum_of_ranks(*nodes, rank, device) == expected_sum(comm, in_node), "sum of a node");
      expect(sum_of_ranks(comm, rank, device) == comm.size() * (comm.size() - 1) / 2,
             "sum of the world");
    }
    // A part of a part, numbered backwards; then the part goes first.
    auto backwards = rails->split(0, -rank);
    expect(backwards->size() == rails->size() &&
               backwards->rank() == rails->size() - 1 - rails->rank(),
           "a part numbered backwards");
    rails.reset();
    expect(sum_of_ranks(*backwards, rank, device) == expected_sum(comm, on_rail),
           "a part whose parent is gone");
  }
  // Some ranks join nothing, and split themselves no further.
  auto first = comm.split(rank < 2 ? 0 : -1, rank);
  expect((first != nullptr) == (rank < 2), "who joins");
  if (first) {
    auto pair = first->split(0, rank);
    expect(sum_of_ranks(*pair, rank, device) == expected_sum(comm, [](int r) { return r < 2; }),
           "sum of the first two");
  }
  comm.barrier();
}

// A drawn sequence of operations of three kinds of groups on three streams; every rank gets there in its own time. Each rank
// keeps on paper what the elements of all ranks are.
void groups_on_several_streams(Communicator& comm, Device device) {
  const int rank = comm.rank();
  const auto nodes = comm.split(rank / 2, rank), rails = comm.split(rank % 2, -rank);
  Communicator* const groups[] = {&comm, nodes.get(), rails.get()};
  const auto color = [](std::size_t kind, int r) {
    return kind == 0 ? 0 : kind == 1 ? r / 2 : r % 2;
  };
  constexpr std::size_t kStreams = 3, kLength = 500;
  using Ints = std::vector<std::int64_t>;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Values<std::int64_t>>> values;
  std::vector<Ints> paper(kStreams);
  for (std::size_t s = 0; s < kStreams; ++s) {
    streams.push_back(std::make_unique<Stream>(device, "stream"));
    values.push_back(std::make_unique<Values<std::int64_t>>(Ints(kLength, rank + 1), device));
    for (int r = 0; r < comm.size(); ++r)
      paper[s].push_back(r + 1);
  }
  for (std::uint64_t i = 0; i < 60; ++i) {
    const auto kind = static_cast<std::size_t>(uniform(17, 2 * i) * 3),
               s = static_cast<std::size_t>(uniform(17, 2 * i + 1) * kStreams);
    const ReduceOp op = i < 24 ? ReduceOp::sum : i % 2 == 0 ? ReduceOp::max : ReduceOp::min;
    groups[kind]->all_reduce(values[s]->view(), op, *streams[s]);
    const Ints before = paper[s];
    for (int r = 0; r < comm.size(); ++r) {
      std::int64_t& value = paper[s][static_cast<std::size_t>(r)];
      value = op == ReduceOp::sum ? 0 : value;
      for (int p = 0; p < comm.size(); ++p) {
        if (color(kind, p) != color(kind, r)) continue;
        const std::int64_t x = before[static_cast<std::size_t>(p)];
        value = op == ReduceOp::sum   ? value + x
                : op == ReduceOp::max ? std::max(value, x)
                                      : std::min(value, x);
      }
    }
  }
  for (std::size_t s = 0; s < kStreams; ++s) {
    streams[s]->synchronize();
    expect_equal(values[s]->get(),
                 Ints(kLength, paper[s][static_cast<std::size_t>(rank)]),
                 "operations of several groups");
  }
}

constexpr ConformanceCase kGroups[] = {
    {"splits in several orders", splits_in_several_orders},
    {"groups on several streams", groups_on_several_streams},
};

}  // namespace

std::span<const ConformanceCase> group_cases() {
  return kGroups;
}

}  // namespace moesaic::test
