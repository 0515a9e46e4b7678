#include "parallel/dispatch/link_speeds.h"

#include <algorithm>
#include <chrono>

#include "memory/buffer.h"

namespace moesaic {
namespace {

constexpr std::int64_t kSmallest = 64, kFirst = std::int64_t{32} << 10,
                       kLargest = std::int64_t{32} << 20;
constexpr double kLongEnough = 0.02;  // seconds of a round
constexpr int kRounds = 5;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Rounds {
 public:
  Rounds(Communicator& group, const NodeGrid& grid, Device device, Link link)
      : group_(group), stream_(device, "link speeds") {
    for (int p = 0; p < grid.ranks(); ++p) {
      if (grid.link(group.rank(), p) == link) peers_.push_back(p);
    }
  }
  std::int64_t peers() const { return static_cast<std::int64_t>(peers_.size()); }

  // Median seconds of rounds with so many bytes per peer, of the slowest rank each.
  double seconds(std::int64_t bytes) {
    out_ = Buffer(static_cast<std::size_t>(bytes), stream_.device(), "link speeds");
    in_ = Buffer(static_cast<std::size_t>(bytes * peers()), stream_.device(), "link speeds");
    std::vector<double> times;
    for (int i = 0; i <= kRounds; ++i) {
      group_.barrier();
      const double start = now();
      round(bytes);
      const double took = group_.all_reduce_host(now() - start, ReduceOp::max);
      if (i > 0) times.push_back(took);  // the first one warms up
    }
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    return times[kRounds / 2];
  }

 private:
  void round(std::int64_t bytes) {
    std::vector<OutgoingMessage> sends;
    std::vector<IncomingMessage> receives;
    std::size_t at = 0;
    for (const int p : peers_) {
      sends.push_back({out_.view({bytes}, DType::u8), p});
      receives.push_back({in_.view({bytes}, DType::u8, at), p});
      at += static_cast<std::size_t>(bytes);
    }
    group_.exchange(sends, receives, stream_);
    stream_.synchronize();
  }

  Communicator& group_;
  Stream stream_;
  std::vector<int> peers_;
  Buffer out_, in_;
};

// Bytes per second and seconds per message.
void measure(Rounds& rounds, double& speed, double& latency) {
  const double smallest = rounds.seconds(kSmallest);
  latency = smallest / static_cast<double>(rounds.peers());
  std::int64_t bytes = kFirst;
  double took = rounds.seconds(bytes);
  while (took < kLongEnough && bytes < kLargest) {
    bytes *= 4;
    took = rounds.seconds(bytes);
  }
  speed = static_cast<double>(bytes * rounds.peers()) / std::max(took - smallest, 0.1 * took);
}

}  // namespace

LinkSpeeds measure_link_speeds(Communicator& group, const NodeGrid& grid, Device device) {
  LinkSpeeds speeds;
  if (grid.per_node > 1) {
    Rounds inside(group, grid, device, Link::node);
    measure(inside, speeds.node, speeds.node_latency);
  }
  if (grid.nodes > 1) {
    Rounds between(group, grid, device, Link::network);
    measure(between, speeds.network, speeds.network_latency);
  }
  return speeds;
}

}  // namespace moesaic
