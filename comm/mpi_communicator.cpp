#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <mpi.h>

#include "comm/host_communicator.h"
#include "comm/launch_check.h"
#include "comm/mpi_environment.h"

namespace moesaic {
namespace {

constexpr int kTagAllToAll = 1;
constexpr int kTagMessage = 2;
// MPI moves a message by a few fragments per call and does not show it. Pieces that arrive do: as long as they come, nobody
// sleeps between calls.
constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;

void check_mpi(int status, const char* call, int rank) {
  if (status == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  throw InternalError(
      fmt::format("rank {}: {} failed with code {}: {}", rank, call, status, text.data()));
}
#define MOESAIC_MPI(call) check_mpi(call, #call, rank_)

// Waiting without taking the core from the compute threads: MPI's own waits spin for ever.
class Backoff {
 public:
  void pause() {
    ++tries_;
    if (tries_ < 200) return;
    if (tries_ == 200) since_ = std::chrono::steady_clock::now();
    if (tries_ < 400) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(tries_ < 2000 ? 20 : 100));
    }
  }
  bool is_long() const {
    return tries_ > 400 &&
           std::chrono::steady_clock::now() - since_ > std::chrono::milliseconds(200);
  }

 private:
  int tries_ = 0;
  std::chrono::steady_clock::time_point since_;
};

class MpiTransport final : public HostTransport {
 public:
  MpiTransport(MPI_Comm comm, std::int64_t max_message, Activity* activity)
      : comm_(comm), max_message_(std::min(max_message, kPieceBytes)), activity_(activity) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    find_world_ranks();
  }
  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&comm_);
  }
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const char* name() const noexcept override { return "mpi"; }
  int world_rank(int member) const override {
    return world_ranks_[static_cast<std::size_t>(member)];
  }

  std::unique_ptr<HostTransport> split(int color, int key) override {
    MPI_Comm part = MPI_COMM_NULL;
    MOESAIC_MPI(MPI_Comm_split(comm_, color < 0 ? MPI_UNDEFINED : color, key, &part));
    if (part == MPI_COMM_NULL) return nullptr;
    return std::make_unique<MpiTransport>(part, max_message_, activity_);
  }

  void all_to_all(std::span<const SendBlock> sends, std::span<const RecvBlock> receives) override {
    const auto me = static_cast<std::size_t>(rank_);
    for (int step = 1; step < size_; ++step) {  // each rank starts with another peer
      const int from = (rank_ - step + size_) % size_;
      post_receive(receives[static_cast<std::size_t>(from)], from, kTagAllToAll);
    }
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_;
      post_send(sends[static_cast<std::size_t>(to)], to, kTagAllToAll);
    }
    MOESAIC_CHECK(sends[me].bytes == receives[me].bytes,
                  "a rank's rows for itself differ in number");
    if (sends[me].bytes > 0 && sends[me].data != receives[me].data) {
      std::memcpy(receives[me].data, sends[me].data, static_cast<std::size_t>(sends[me].bytes));
    }
    wait_all();
  }

  void broadcast(std::byte* data, std::int64_t bytes, int root) override {
    for (std::int64_t at = 0; at < bytes; at += max_message_) {
      const auto n = static_cast<int>(std::min(max_message_, bytes - at));
      MOESAIC_MPI(MPI_Ibcast(data + at, n, MPI_BYTE, root, comm_, &requests_.emplace_back()));
      peers_.push_back(root == rank_ ? kNobody : root);
      wait_all();
    }
  }

  void exchange(std::span<const Send> sends, std::span<const Receive> receives) override {
    for (const auto& r : receives)
      post_receive(r.block, r.peer, kTagMessage);
    for (const auto& s : sends)
      post_send(s.block, s.peer, kTagMessage);
    wait_all();
  }

  void barrier() override {
    MOESAIC_MPI(MPI_Ibarrier(comm_, &requests_.emplace_back()));
    peers_.push_back(kNobody);
    wait_all();
  }

  bool library_all_reduce(std::byte* data, std::int64_t count, DType dtype, ReduceOp op) override {
    const auto type = mpi_type(dtype);
    if (!type) return false;
    const MPI_Op mpi_op = op == ReduceOp::sum ? MPI_SUM : op == ReduceOp::max ? MPI_MAX : MPI_MIN;
    const auto element = static_cast<std::int64_t>(byte_size(dtype));
    const std::int64_t piece = std::max<std::int64_t>(1, max_message_ / element);
    for (std::int64_t at = 0; at < count; at += piece) {
      const auto n = static_cast<int>(std::min(piece, count - at));
      MOESAIC_MPI(MPI_Iallreduce(
          MPI_IN_PLACE, data + at * element, n, *type, mpi_op, comm_, &requests_.emplace_back()));
      peers_.push_back(kNobody);
      wait_all();
    }
    return true;
  }

 private:
  static std::optional<MPI_Datatype> mpi_type(DType dtype) {
    switch (dtype) {
      case DType::f64:
        return MPI_DOUBLE;
      case DType::f32:
        return MPI_FLOAT;
      case DType::i64:
        return MPI_INT64_T;
      case DType::i32:
        return MPI_INT32_T;
      default:
        return std::nullopt;
    }
  }
  // Pieces of one block carry one tag: MPI keeps their order, and both sides cut alike. A block of
  // no bytes is no message.
  void post_receive(RecvBlock block, int peer, int tag) {
    for (std::int64_t at = 0; at < block.bytes; at += max_message_) {
      const auto n = static_cast<int>(std::min(max_message_, block.bytes - at));
      MOESAIC_MPI(
          MPI_Irecv(block.data + at, n, MPI_BYTE, peer, tag, comm_, &requests_.emplace_back()));
      peers_.push_back(peer);
      expected_.push_back(n);
    }
  }
  void post_send(SendBlock block, int peer, int tag) {
    for (std::int64_t at = 0; at < block.bytes; at += max_message_) {
      const auto n = static_cast<int>(std::min(max_message_, block.bytes - at));
      MOESAIC_MPI(
          MPI_Isend(block.data + at, n, MPI_BYTE, peer, tag, comm_, &requests_.emplace_back()));
      peers_.push_back(peer);
    }
  }
  // Receives were posted first, so expected_[i] belongs to requests_[i].
  void wait_all() {
    const std::size_t n = requests_.size();
    std::vector<MPI_Status> statuses(n), some(n);
    std::vector<int> which(n);
    Backoff backoff;
    bool is_noted = false;
    for (std::size_t open = n; open > 0;) {
      int count = 0;
      check_some(
          MPI_Testsome(static_cast<int>(n), requests_.data(), &count, which.data(), some.data()),
          some);
      if (count > 0) {
        for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i)
          statuses[static_cast<std::size_t>(which[i])] = some[i];
        open -= static_cast<std::size_t>(count);
        is_noted = false;
        backoff = Backoff();
        count_progress();
        continue;
      }
      backoff.pause();
      if (is_noted || !backoff.is_long()) continue;
      note_awaited();
      is_noted = true;
    }
    requests_.clear();
    peers_.clear();
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      int received = 0;
      MPI_Get_count(&statuses[i], MPI_BYTE, &received);
      MOESAIC_CHECK(received == expected_[i],
                    fmt::format("rank {}: received {} bytes from rank {}, expected {}",
                                rank_,
                                received,
                                statuses[i].MPI_SOURCE,
                                expected_[i]));
    }
    expected_.clear();
  }

  // A failed request among several is found in its status.
  void check_some(int status, const std::vector<MPI_Status>& some) {
    if (status == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& one : some) {
        if (one.MPI_ERROR != MPI_SUCCESS && one.MPI_ERROR != MPI_ERR_PENDING)
          check_mpi(one.MPI_ERROR, "MPI_Testsome", rank_);
      }
    }
    check_mpi(status, "MPI_Testsome", rank_);
  }
  // For the watchdog: whose messages are missing; without any, who does not take ours.
  void note_awaited() {
    if (activity_ == nullptr) return;
    std::vector<int> awaited;
    const auto add = [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        if (requests_[i] == MPI_REQUEST_NULL || peers_[i] == kNobody) continue;
        const int rank = world_rank(peers_[i]);
        if (std::find(awaited.begin(), awaited.end(), rank) == awaited.end())
          awaited.push_back(rank);
      }
    };
    add(0, expected_.size());
    if (awaited.empty()) add(expected_.size(), requests_.size());
    activity_->exchange.update([&](Exchange& what) {
      what.awaited = static_cast<std::int32_t>(awaited.size());
      for (std::size_t i = 0; i < std::min(awaited.size(), what.awaited_ranks.size()); ++i)
        what.awaited_ranks[i] = awaited[i];
    });
  }
  void find_world_ranks() {
    MPI_Group world = MPI_GROUP_NULL, own = MPI_GROUP_NULL;
    MOESAIC_MPI(MPI_Comm_group(MPI_COMM_WORLD, &world));
    MOESAIC_MPI(MPI_Comm_group(comm_, &own));
    std::vector<int> members(static_cast<std::size_t>(size_));
    std::iota(members.begin(), members.end(), 0);
    world_ranks_.resize(members.size());
    MOESAIC_MPI(MPI_Group_translate_ranks(own, size_, members.data(), world, world_ranks_.data()));
    MPI_Group_free(&own);
    MPI_Group_free(&world);
  }

  static constexpr int kNobody =
      -1;  // a collective of the library, which does not say whom it waits for
  MPI_Comm comm_;
  std::int64_t max_message_;
  Activity* activity_;
  std::vector<int> world_ranks_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;  // of each request, in this group
  std::vector<int> expected_;
};

class MpiCommunicator final : public HostCommunicator {
 public:
  using HostCommunicator::HostCommunicator;

  [[noreturn]] void abort(int code, const std::string& why) override {
    std::fprintf(
        stderr, "moesaic: rank %d ends the job with code %d: %s\n", rank(), code, why.c_str());
    std::fflush(nullptr);
    // MPI_Abort reaches the others at once, but only the communication thread may call it; if that
    // thread waits for a peer, the launcher ends the others when it sees this exit status.
    queue().try_run([code] { MPI_Abort(MPI_COMM_WORLD, code); }, std::chrono::milliseconds(200));
    std::_Exit(code);
  }

 protected:
  std::unique_ptr<HostCommunicator> make(std::unique_ptr<HostTransport> transport) override {
    return std::make_unique<MpiCommunicator>(shared_queue(), std::move(transport), options());
  }
};

const char* environment_variable(const char* name) {
  return std::getenv(name);
}

}  // namespace

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check_mpi(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version", 0);
  return text.data();
}

struct MpiEnvironment::Impl {
  explicit Impl(Activity* activity) : queue(std::make_shared<CommQueue>(activity)) {}
  std::shared_ptr<CommQueue> queue;
  std::unique_ptr<MpiCommunicator> world;
  int local_rank = 0;
  int local_size = 1;
  std::string version;
  bool initialized = false;

  ~Impl() {
    world.reset();
    if (initialized) queue->run([] { MPI_Finalize(); }, {.operation = "MPI_Finalize"});
  }

  void start(const CommOptions& options) {
    const int rank_ = 0;
    int provided = 0;
    MOESAIC_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided));
    initialized = true;
    if (provided < MPI_THREAD_FUNNELED) {
      throw UsageError(
          "this MPI library offers no thread support (MPI_THREAD_FUNNELED); use Open MPI 4.1 or "
          "newer");
    }
    version = mpi_library_version();
    MPI_Comm machine = MPI_COMM_NULL;
    MOESAIC_MPI(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine));
    MPI_Comm_rank(machine, &local_rank);
    MPI_Comm_size(machine, &local_size);
    MPI_Comm_free(&machine);
    MPI_Comm all = MPI_COMM_NULL;
    MOESAIC_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &all));
    transport = std::make_unique<MpiTransport>(all, options.max_message_bytes, options.activity);
  }
  std::unique_ptr<HostTransport> transport;
};

MpiEnvironment::MpiEnvironment(const CommOptions& options)
    : impl_(std::make_unique<Impl>(options.activity)) {
  MOESAIC_CHECK(
      options.max_message_bytes >= 1 && options.max_message_bytes <= (std::int64_t{1} << 30),
      "max_message_bytes must lie in 1 … 2^30");
  check_launch_before_mpi(environment_variable);
  impl_->queue->run([&] { impl_->start(options); }, {.operation = "MPI_Init"});
  impl_->world =
      std::make_unique<MpiCommunicator>(impl_->queue, std::move(impl_->transport), options);
  check_launch(rank(), size(), environment_variable);
}

MpiEnvironment::~MpiEnvironment() {
  // Unwinding from an error: the other ranks are not coming to MPI_Finalize, and the communication
  // thread may be waiting for them. The process ends without it; the launcher ends the others.
  if (std::uncaught_exceptions() > 0 && size() > 1) static_cast<void>(impl_.release());
}
int MpiEnvironment::rank() const noexcept {
  return impl_->world->rank();
}
int MpiEnvironment::size() const noexcept {
  return impl_->world->size();
}
int MpiEnvironment::local_rank() const noexcept {
  return impl_->local_rank;
}
int MpiEnvironment::local_size() const noexcept {
  return impl_->local_size;
}
std::string MpiEnvironment::library_version() const {
  return impl_->version;
}
Communicator& MpiEnvironment::world() noexcept {
  return *impl_->world;
}

}  // namespace moesaic
