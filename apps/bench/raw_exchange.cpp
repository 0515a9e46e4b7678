#include "apps/bench/raw_exchange.h"

#include <cstring>
#include <random>

#include <fmt/format.h>

#include "apps/bench/timing.h"
#include "core/base/error.h"
#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic::bench {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr int kInARound = 10;

class Peers {
 public:
  Peers(Communicator& group, Device device, std::int64_t mib, std::uint64_t seed)
      : group_(group),
        mib_(mib),
        seed_(seed),
        stream_(device, "raw exchange"),
        block_(static_cast<std::size_t>(kMiB), kCpu, "raw exchange, host"),
        out_(size(group.size() - 1), device, "raw exchange, out"),
        in_(size(group.size() - 1), device, "raw exchange, in") {
    for (int p = 0; p < group.size(); ++p) {
      if (p == group.rank()) continue;
      const std::int64_t begin = (p < group.rank() ? p : p - 1) * bytes();
      sends_.push_back({out_.view({bytes()}, DType::u8, static_cast<std::size_t>(begin)), p});
      receives_.push_back({in_.view({bytes()}, DType::u8, static_cast<std::size_t>(begin)), p});
    }
    for (std::size_t i = 0; i < sends_.size(); ++i)
      fill(static_cast<std::int64_t>(i), random_block(group.rank(), sends_[i].peer));
  }
  std::int64_t bytes() const { return mib_ * kMiB; }

  double seconds_of_one() {
    Timestamp begin(stream_.device()), end(stream_.device());
    stream_.record(begin);
    for (int i = 0; i < kInARound; ++i)
      group_.exchange(sends_, receives_, stream_);
    stream_.record(end);
    stream_.synchronize();
    return seconds_between(begin, end) / kInARound;
  }

  void check() {
    for (const IncomingMessage& m : receives_) {
      const std::vector<std::uint8_t> want = random_block(m.peer, group_.rank());
      for (const std::int64_t at : {std::int64_t{0}, bytes() - kMiB}) {
        copy_tensor(block_.view({kMiB}, DType::u8), m.data.rows(at, at + kMiB), stream_);
        stream_.synchronize();
        MOESAIC_CHECK(
            std::memcmp(block_.view({kMiB}, DType::u8).data(), want.data(), want.size()) == 0,
            fmt::format("what rank {} sent to rank {} arrived otherwise", m.peer, group_.rank()));
      }
    }
  }

 private:
  std::size_t size(int peers) const { return static_cast<std::size_t>(peers * bytes()); }
  std::vector<std::uint8_t> random_block(int from, int to) const {
    std::seed_seq words{seed_, static_cast<std::uint64_t>(from), static_cast<std::uint64_t>(to)};
    std::mt19937_64 random(words);
    std::vector<std::uint8_t> block(static_cast<std::size_t>(kMiB));
    for (std::size_t i = 0; i < block.size(); i += 8) {
      const std::uint64_t word = random();
      std::memcpy(block.data() + i, &word, 8);
    }
    return block;
  }
  void fill(std::int64_t peer, const std::vector<std::uint8_t>& block) {
    std::memcpy(block_.view({kMiB}, DType::u8).data(), block.data(), block.size());
    for (std::int64_t i = 0; i < mib_; ++i) {
      const auto at = static_cast<std::size_t>(peer * bytes() + i * kMiB);
      copy_tensor(out_.view({kMiB}, DType::u8, at), block_.view({kMiB}, DType::u8), stream_);
    }
    stream_.synchronize();
  }

  Communicator& group_;
  std::int64_t mib_;
  std::uint64_t seed_;
  Stream stream_;
  Buffer block_, out_, in_;
  std::vector<OutgoingMessage> sends_;
  std::vector<IncomingMessage> receives_;
};

}  // namespace

std::vector<RawExchange> time_raw_exchanges(Communicator& group,
                                            Communicator& host,
                                            Device device,
                                            std::span<const std::int64_t> mib,
                                            int repeats,
                                            std::uint64_t seed) {
  std::vector<RawExchange> results;
  if (group.size() == 1) return results;
  for (const std::int64_t size : mib) {
    Peers peers(group, device, size, seed);
    peers.seconds_of_one();  // warms up
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      host.barrier();
      times.push_back(host.all_reduce_host(peers.seconds_of_one(), ReduceOp::max));
    }
    peers.check();
    const double seconds = median(times);
    const auto sent = static_cast<double>(peers.bytes() * (group.size() - 1));
    results.push_back(
        {.bytes = peers.bytes(), .seconds = seconds, .bytes_per_second = sent / seconds});
  }
  return results;
}

}  // namespace moesaic::bench
