#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "comm/host_communicator.h"

namespace moesaic {
namespace {

// One lock for all groups of a world, so that abort() reaches every waiting rank.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  bool aborted = false;
  std::string reason;

  void check() const {
    if (aborted) throw InternalError(reason);
  }
  void abort(const std::string& why) {
    {
      const std::lock_guard lock(mutex);
      if (aborted) return;
      aborted = true;
      reason = why;
    }
    changed.notify_all();
  }
};

// What the ranks of one group share.
struct Hub {
  Hub(std::shared_ptr<World> w, int n)
      : world(std::move(w)),
        size(n),
        posts(static_cast<std::size_t>(n)),
        world_ranks(static_cast<std::size_t>(n)) {}

  struct Post {
    std::span<const SendBlock> sends;
    const std::byte* data = nullptr;
    int color = 0, key = 0;
    std::shared_ptr<Hub> created;
  };

  void barrier() {
    std::unique_lock lock(world->mutex);
    world->check();
    const auto round = rounds;
    if (++arrived == size) {
      arrived = 0;
      ++rounds;
      lock.unlock();
      world->changed.notify_all();
      return;
    }
    world->changed.wait(lock, [&] { return rounds != round || world->aborted; });
    if (rounds == round) world->check();
  }

  std::shared_ptr<World> world;
  int size;
  int arrived = 0;
  std::uint64_t rounds = 0;
  std::vector<Post> posts;  // each rank writes its own between two barriers
  std::vector<int> world_ranks;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> mail;
};

class LocalTransport final : public HostTransport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return hub_->size; }
  const char* name() const noexcept override { return "local"; }
  int world_rank(int member) const override {
    return hub_->world_ranks[static_cast<std::size_t>(member)];
  }

  std::unique_ptr<HostTransport> split(int color, int key) override {
    post().color = color;
    post().key = key;
    hub_->barrier();
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int r = 0; r < size(); ++r) {
      if (at(r).color == color) members.emplace_back(at(r).key, r);
    }
    std::sort(members.begin(), members.end());
    const int first = members.front().second;
    if (first == rank_) {
      auto created = std::make_shared<Hub>(hub_->world, static_cast<int>(members.size()));
      for (std::size_t i = 0; i < members.size(); ++i)
        created->world_ranks[i] = world_rank(members[i].second);
      post().created = std::move(created);
    }
    hub_->barrier();
    auto part = at(first).created;
    hub_->barrier();
    post().created = nullptr;
    if (color < 0) return nullptr;
    const auto me = std::find(members.begin(), members.end(), std::pair(key, rank_));
    return std::make_unique<LocalTransport>(std::move(part),
                                            static_cast<int>(me - members.begin()));
  }

  void all_to_all(std::span<const SendBlock> sends, std::span<const RecvBlock> receives) override {
    post().sends = sends;
    hub_->barrier();
    for (int p = 0; p < size(); ++p) {
      const SendBlock from = at(p).sends[static_cast<std::size_t>(rank_)];
      const RecvBlock to = receives[static_cast<std::size_t>(p)];
      MOESAIC_CHECK(
          from.bytes == to.bytes,
          fmt::format(
              "rank {} sends {} bytes, rank {} expects {}", p, from.bytes, rank_, to.bytes));
      if (to.bytes > 0 && from.data != to.data)
        std::memcpy(to.data, from.data, static_cast<std::size_t>(to.bytes));
    }
    hub_->barrier();
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    post().data = data;
    hub_->barrier();
    if (rank_ != root) std::memcpy(data, at(root).data, static_cast<std::size_t>(bytes));
    hub_->barrier();
  }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives) override {
    std::unique_lock lock(hub_->world->mutex);
    for (const auto& s : sends) {
      hub_->mail[{rank_, s.peer}].emplace_back(s.block.data, s.block.data + s.block.bytes);
    }
    hub_->world->changed.notify_all();
    for (const auto& r : receives) {
      auto& box = hub_->mail[{r.peer, rank_}];
      hub_->world->changed.wait(lock, [&] { return !box.empty() || hub_->world->aborted; });
      if (box.empty()) hub_->world->check();
      MOESAIC_CHECK(static_cast<std::int64_t>(box.front().size()) == r.block.bytes,
                    fmt::format("rank {} sent {} bytes, rank {} expects {}",
                                r.peer,
                                box.front().size(),
                                rank_,
                                r.block.bytes));
      std::copy(box.front().begin(), box.front().end(), r.block.data);
      box.pop_front();
    }
  }

  void barrier() override { hub_->barrier(); }
  bool library_all_reduce(std::byte*, std::int64_t, DType, ReduceOp) override { return false; }
  World& world() noexcept { return *hub_->world; }

 private:
  Hub::Post& post() { return at(rank_); }
  Hub::Post& at(int rank) { return hub_->posts[static_cast<std::size_t>(rank)]; }
  std::shared_ptr<Hub> hub_;
  int rank_;
};

class LocalCommunicator final : public HostCommunicator {
 public:
  LocalCommunicator(std::shared_ptr<CommQueue> queue,
                    std::unique_ptr<HostTransport> transport,
                    std::shared_ptr<World> world,
                    const CommOptions& options)
      : HostCommunicator(std::move(queue), std::move(transport), options),
        world_(std::move(world)) {}

  [[noreturn]] void abort(int code, const std::string& why) override {
    world_->abort(fmt::format("rank {} ended the job with code {}: {}", rank(), code, why));
    throw Error(static_cast<ExitCode>(code), why);
  }

 protected:
  std::unique_ptr<HostCommunicator> make(std::unique_ptr<HostTransport> transport) override {
    return std::make_unique<LocalCommunicator>(
        shared_queue(), std::move(transport), world_, options());
  }

 private:
  std::shared_ptr<World> world_;
};

std::vector<std::unique_ptr<Communicator>> make_ranks(const std::shared_ptr<World>& world,
                                                      int size,
                                                      const CommOptions& options) {
  MOESAIC_CHECK(size >= 1, "a local group needs at least one rank");
  const auto hub = std::make_shared<Hub>(world, size);
  std::iota(hub->world_ranks.begin(), hub->world_ranks.end(), 0);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<LocalCommunicator>(
        std::make_shared<CommQueue>(), std::make_unique<LocalTransport>(hub, r), world, options));
  }
  return ranks;
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_local_communicators(int size,
                                                                    const CommOptions& options) {
  return make_ranks(std::make_shared<World>(), size, options);
}

void run_local_ranks(int size,
                     const std::function<void(Communicator&)>& body,
                     const CommOptions& options) {
  const auto world = std::make_shared<World>();
  auto ranks = make_ranks(world, size, options);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*ranks[static_cast<std::size_t>(r)]);
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        world->abort(fmt::format("rank {} failed: {}", r, e.what()));
      }
    });
  }
  for (auto& t : threads)
    t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace moesaic
