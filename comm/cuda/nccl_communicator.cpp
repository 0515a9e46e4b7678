#include <algorithm>
#include <cstring>
#include <exception>

#include <fmt/format.h>

#include "comm/cuda/combine.h"
#include "comm/cuda/nccl_handles.h"
#include "memory/cuda/check.h"
#include "memory/owned.h"

namespace moesaic {
namespace {

using cuda::ExchangeStream;
using cuda::kStagingBytes;

void check_device(const ConstTensorView& view, Device device, const char* what) {
  MOESAIC_CHECK(view.device() == device,
                fmt::format("{} is on {}; this communicator moves memory of {}",
                            what,
                            to_string(view.device()),
                            to_string(device)));
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::i64:
      return ncclInt64;
    case DType::i32:
      return ncclInt32;
    default:
      check_failed(__FILE__,
                   __LINE__,
                   "f64 | f32 | bf16 | i64 | i32",
                   std::string("cannot reduce ") + name(dtype));
  }
}
ncclRedOp_t nccl_op(ReduceOp op) {
  return op == ReduceOp::sum ? ncclSum : op == ReduceOp::max ? ncclMax : ncclMin;
}

// Elements [begin(p), begin(p + 1)) of n are combined by rank p.
std::int64_t slice_begin(std::int64_t n, int size, int p) {
  return n / size * p + std::min<std::int64_t>(p, n % size);
}

class NcclCommunicator final : public Communicator {
 public:
  /// The ranks of `host`, with `comm` of them, or without one for a single rank. `owned`: `host` when it is a part's.
  NcclCommunicator(Communicator& host,
                   std::unique_ptr<Communicator> owned,
                   std::shared_ptr<ExchangeStream> exchange,
                   ncclComm_t comm)
      : host_(host),
        owned_(std::move(owned)),
        exchange_(std::move(exchange)),
        comm_(comm),
        rank_(host.rank()),
        size_(host.size()) {
    if (comm_ != nullptr) exchange_->watch().add(comm_);
  }
  ~NcclCommunicator() override {
    // While an error unwinds, the other ranks are not coming; the process is about to end.
    if (comm_ == nullptr || std::uncaught_exceptions() > 0) return;
    exchange_->watch().remove(comm_);
    try {
      exchange_->synchronize();
      MOESAIC_NCCL(ncclCommDestroy(comm_));
    } catch (...) {
      log_teardown_failure(static_cast<int>(ExitCode::internal));
    }
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const char* name() const noexcept override { return "nccl"; }

  std::unique_ptr<Communicator> split(int color, int key) override {
    auto part = host_.split(color, key);
    ++splits_;
    ncclComm_t comm = nullptr;
    if (comm_ != nullptr) {
      exchange_->synchronize();
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.splitShare = 1;
      // All ranks of the parent take part; a group of one gets no communicator.
      const bool joins = part != nullptr && part->size() > 1;
      MOESAIC_NCCL(ncclCommSplit(comm_, joins ? color : NCCL_SPLIT_NOCOLOR, key, &comm, &config));
    }
    if (part == nullptr) return nullptr;
    Communicator& host = *part;
    auto made = std::make_unique<NcclCommunicator>(host, std::move(part), exchange_, comm);
    made->group_ = fmt::format("{}/{}:{}", group_, splits_, color);
    return made;
  }

  void all_reduce(TensorView inout, ReduceOp op, Stream& stream) override {
    check_device(inout, exchange_->device(), "reduced tensor");
    const ncclDataType_t type = nccl_type(inout.dtype());
    if (size_ == 1 || inout.numel() == 0) return;
    in_stream(stream, describe("all_reduce", inout.bytes()), [&] {
      if (exchange_->reduction() == Reduction::library) {
        MOESAIC_NCCL(ncclAllReduce(inout.data(),
                                   inout.data(),
                                   static_cast<std::size_t>(inout.numel()),
                                   type,
                                   nccl_op(op),
                                   comm_,
                                   exchange_->get()));
      } else {
        ordered_all_reduce(inout, op);
      }
    });
  }

  void reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& stream) override {
    check_device(out, exchange_->device(), "reduce-scatter output");
    check_device(in, exchange_->device(), "reduce-scatter input");
    check_dtype(out, in.dtype(), "reduce-scatter output");
    const ncclDataType_t type = nccl_type(in.dtype());
    MOESAIC_CHECK(in.numel() == out.numel() * size_,
                  "reduce-scatter input must be size() times the output");
    if (size_ == 1) return copy_unless_same(out, in, stream);
    in_stream(stream, describe("reduce_scatter", in.bytes()), [&] {
      if (exchange_->reduction() == Reduction::library) {
        MOESAIC_NCCL(ncclReduceScatter(in.data(),
                                       out.data(),
                                       static_cast<std::size_t>(out.numel()),
                                       type,
                                       nccl_op(op),
                                       comm_,
                                       exchange_->get()));
      } else {
        ordered_reduce_scatter(out, in, op);
      }
    });
  }

  void all_gather(TensorView out, ConstTensorView in, Stream& stream) override {
    check_device(out, exchange_->device(), "all-gather output");
    check_device(in, exchange_->device(), "all-gather input");
    check_dtype(out, in.dtype(), "all-gather output");
    MOESAIC_CHECK(out.numel() == in.numel() * size_,
                  "all-gather output must be size() times the input");
    if (size_ == 1) return copy_unless_same(out, in, stream);
    in_stream(stream, describe("all_gather", in.bytes()), [&] {
      MOESAIC_NCCL(
          ncclAllGather(in.data(), out.data(), in.bytes(), ncclUint8, comm_, exchange_->get()));
    });
  }

  void reduce_to_owners(TensorView inout,
                        std::span<const std::int64_t> bounds,
                        ReduceOp op,
                        Stream& stream) override {
    check_device(inout, exchange_->device(), "reduced tensor");
    const ncclDataType_t type = nccl_type(inout.dtype());
    check_bounds(bounds, size_, inout.numel());
    if (size_ == 1 || inout.numel() == 0) return;
    const auto begin = [&](int p) { return bounds[static_cast<std::size_t>(p)]; };
    const auto length = [&](int p) { return begin(p + 1) - begin(p); };
    const auto element = static_cast<std::int64_t>(byte_size(inout.dtype()));
    in_stream(stream, describe("reduce_to_owners", inout.bytes()), [&] {
      if (exchange_->reduction() == Reduction::library) {
        MOESAIC_NCCL(ncclGroupStart());
        for (int p = 0; p < size_; ++p) {
          std::byte* const part = inout.data() + begin(p) * element;
          if (length(p) > 0)
            MOESAIC_NCCL(ncclReduce(part,
                                    part,
                                    static_cast<std::size_t>(length(p)),
                                    type,
                                    nccl_op(op),
                                    p,
                                    comm_,
                                    exchange_->get()));
        }
        MOESAIC_NCCL(ncclGroupEnd());
        return;
      }
      const std::int64_t piece = kStagingBytes / 2 / element / size_;
      std::int64_t longest = 0;
      for (int p = 0; p < size_; ++p)
        longest = std::max(longest, length(p));
      // The parts advance together; short ones are done before the others.
      for (std::int64_t at = 0; at < longest; at += piece) {
        const auto from = [&](int p) {
          return inout.data() + (begin(p) + std::min(at, length(p))) * element;
        };
        reduce_piece(
            from(rank_),
            from,
            [&](int p) { return std::clamp<std::int64_t>(length(p) - at, 0, piece); },
            inout.dtype(),
            op);
      }
    });
  }

  void gather_from_owners(TensorView inout,
                          std::span<const std::int64_t> bounds,
                          Stream& stream) override {
    check_device(inout, exchange_->device(), "gathered tensor");
    check_bounds(bounds, size_, inout.numel());
    if (size_ == 1 || inout.numel() == 0) return;
    const auto element = static_cast<std::int64_t>(byte_size(inout.dtype()));
    const auto offset = [&](int p) { return bounds[static_cast<std::size_t>(p)] * element; };
    in_stream(stream, describe("gather_from_owners", inout.bytes()), [&] {
      exchange_blocks(
          [&](int) {
            return Block{inout.data() + offset(rank_), offset(rank_ + 1) - offset(rank_)};
          },
          [&](int p) {
            return MutableBlock{inout.data() + offset(p), offset(p + 1) - offset(p)};
          });
    });
  }

  void all_to_all(TensorView out,
                  ConstTensorView in,
                  const AllToAllPlan& plan,
                  Stream& stream) override {
    check_device(out, exchange_->device(), "all-to-all output");
    check_device(in, exchange_->device(), "all-to-all input");
    plan.check(size_, in.bytes(), out.bytes());
    const auto me = static_cast<std::size_t>(rank_);
    MOESAIC_CHECK(plan.send_rows[me] == plan.recv_rows[me],
                  "a rank's rows for itself differ in number");
    const auto bytes = [&](std::int64_t rows) { return rows * plan.row_bytes; };
    in_stream(stream, describe("all_to_all", in.bytes()), [&] {
      exchange_blocks(
          [&](int p) {
            const auto i = static_cast<std::size_t>(p);
            return Block{in.data() + bytes(plan.send_offset[i]), bytes(plan.send_rows[i])};
          },
          [&](int p) {
            const auto i = static_cast<std::size_t>(p);
            return MutableBlock{out.data() + bytes(plan.recv_offset[i]), bytes(plan.recv_rows[i])};
          });
      copy_on_device(out.data() + bytes(plan.recv_offset[me]),
                     in.data() + bytes(plan.send_offset[me]),
                     bytes(plan.send_rows[me]));
    });
  }

  void broadcast(TensorView inout, int root, Stream& stream) override {
    check_device(inout, exchange_->device(), "broadcast tensor");
    MOESAIC_CHECK(0 <= root && root < size_,
                  fmt::format("no rank {} in a group of {}", root, size_));
    if (size_ == 1 || inout.numel() == 0) return;
    in_stream(stream, describe("broadcast", inout.bytes()), [&] {
      MOESAIC_NCCL(ncclBroadcast(
          inout.data(), inout.data(), inout.bytes(), ncclUint8, root, comm_, exchange_->get()));
    });
  }

  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override {
    const auto check_peer = [&](int peer) {
      MOESAIC_CHECK(
          0 <= peer && peer < size_ && peer != rank_,
          fmt::format("rank {} of {} cannot exchange messages with rank {}", rank_, size_, peer));
    };
    std::size_t bytes = 0;
    for (const auto& m : sends) {
      check_device(m.data, exchange_->device(), "message");
      check_peer(m.peer);
      bytes += m.data.bytes();
    }
    for (const auto& m : receives) {
      check_device(m.data, exchange_->device(), "message");
      check_peer(m.peer);
      bytes += m.data.bytes();
    }
    in_stream(stream, describe("exchange", bytes), [&] {
      MOESAIC_NCCL(ncclGroupStart());
      for (const auto& m : receives)
        post_receive({m.data.data(), static_cast<std::int64_t>(m.data.bytes())}, m.peer);
      for (const auto& m : sends)
        post_send({m.data.data(), static_cast<std::int64_t>(m.data.bytes())}, m.peer);
      MOESAIC_NCCL(ncclGroupEnd());
    });
  }

  void barrier() override { host_.barrier(); }
  double all_reduce_host(double value, ReduceOp op) override {
    return host_.all_reduce_host(value, op);
  }
  std::int64_t all_reduce_host(std::int64_t value, ReduceOp op) override {
    return host_.all_reduce_host(value, op);
  }
  void broadcast_host(std::string& bytes, int root) override { host_.broadcast_host(bytes, root); }
  std::vector<std::string> all_gather_host(const std::string& bytes) override {
    return host_.all_gather_host(bytes);
  }
  [[noreturn]] void abort(int code, const std::string& why) override {
    host_.abort(code, why);
    std::terminate();  // not reached
  }

  /// Connections to all peers are made at their first use, and take memory: here, and not within a step.
  void connect() {
    const TensorView all(exchange_->staging() + kStagingBytes / 2,
                         DType::f32,
                         {std::int64_t{1} << 18},
                         exchange_->device());
    MOESAIC_CUDA_CALL(cudaMemsetAsync(all.data(), 0, all.bytes(), exchange_->get()));
    ordered_all_reduce(all, ReduceOp::sum);
    exchange_->synchronize();
  }

 private:
  struct Block {
    const std::byte* data = nullptr;
    std::int64_t bytes = 0;
  };
  struct MutableBlock {
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
  };

  Exchange describe(const char* operation, std::size_t bytes) {
    Exchange what;
    what.operation = operation;
    group_.copy(what.group.data(), what.group.size() - 1);
    what.number_in_group = ++operations_;
    what.bytes = static_cast<std::int64_t>(bytes);
    what.ranks = size_;
    return what;
  }

  template <class Work>
  void in_stream(Stream& stream, const Exchange& what, const Work& work) {
    MOESAIC_CHECK(stream.device() == exchange_->device(),
                  "the stream belongs to another device than the communicator");
    if (stream.mode() == Stream::Mode::dry) return;
    exchange_->after(stream);
    work();
    exchange_->before(stream);
    if (size_ > 1) exchange_->watch().enqueued(what, exchange_->get());
  }

  void copy_on_device(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (bytes == 0 || to == from) return;
    MOESAIC_CUDA_CALL(cudaMemcpyAsync(
        to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, exchange_->get()));
  }
  static void copy_unless_same(TensorView out, ConstTensorView in, Stream& stream) {
    if (out.data() != in.data()) copy_tensor(out, in.reshaped(out.shape()), stream);
  }

  // A block of no bytes is no message, on both sides.
  void post_send(Block block, int peer) {
    if (block.bytes == 0) return;
    MOESAIC_NCCL(ncclSend(block.data,
                          static_cast<std::size_t>(block.bytes),
                          ncclUint8,
                          peer,
                          comm_,
                          exchange_->get()));
  }
  void post_receive(MutableBlock block, int peer) {
    if (block.bytes == 0) return;
    MOESAIC_NCCL(ncclRecv(block.data,
                          static_cast<std::size_t>(block.bytes),
                          ncclUint8,
                          peer,
                          comm_,
                          exchange_->get()));
  }
  // outgoing(p) to and incoming(p) from every other rank p, all at once; each rank starts with another peer.
  template <class Outgoing, class Incoming>
  void exchange_blocks(const Outgoing& outgoing, const Incoming& incoming) {
    if (size_ == 1) return;
    MOESAIC_NCCL(ncclGroupStart());
    for (int step = 1; step < size_; ++step) {
      const int from = (rank_ - step + size_) % size_, to = (rank_ + step) % size_;
      post_receive(incoming(from), from);
      post_send(outgoing(to), to);
    }
    MOESAIC_NCCL(ncclGroupEnd());
  }

  // Sends every rank its elements source(p), share(p) of them, and combines what comes in into `out`.
  template <class Source, class Share>
  void reduce_piece(
      std::byte* out, const Source& source, const Share& share, DType dtype, ReduceOp op) {
    const auto element = static_cast<std::int64_t>(byte_size(dtype));
    const std::int64_t mine = share(rank_);
    std::byte* const staging = exchange_->staging();
    exchange_blocks(
        [&](int p) {
          return Block{source(p), share(p) * element};
        },
        [&](int p) {
          return MutableBlock{staging + p * mine * element, mine * element};
        });
    cuda::combine_in_order(
        out,
        {.parts = staging, .own = source(rank_), .rank = rank_, .size = size_, .count = mine},
        dtype,
        op,
        exchange_->get());
  }

  void ordered_all_reduce(TensorView inout, ReduceOp op) {
    const auto element = static_cast<std::int64_t>(byte_size(inout.dtype()));
    // Half of the staging: connect() reduces the other half.
    const std::int64_t piece = kStagingBytes / 2 / element / size_ * size_;
    for (std::int64_t at = 0; at < inout.numel(); at += piece) {
      const std::int64_t count = std::min(inout.numel() - at, piece);
      std::byte* const base = inout.data() + at * element;
      const auto begin = [&](int p) { return slice_begin(count, size_, p); };
      const auto share = [&](int p) { return begin(p + 1) - begin(p); };
      std::byte* const mine = base + begin(rank_) * element;
      reduce_piece(
          mine, [&](int p) { return base + begin(p) * element; }, share, inout.dtype(), op);
      exchange_blocks(
          [&](int) {
            return Block{mine, share(rank_) * element};
          },
          [&](int p) {
            return MutableBlock{base + begin(p) * element, share(p) * element};
          });
    }
  }

  void ordered_reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op) {
    const auto element = static_cast<std::int64_t>(byte_size(out.dtype()));
    const std::int64_t n = out.numel(), piece = kStagingBytes / 2 / element / size_;
    for (std::int64_t at = 0; at < n; at += piece) {
      const std::int64_t count = std::min(piece, n - at);
      reduce_piece(
          out.data() + at * element,
          [&](int p) { return in.data() + (p * n + at) * element; },
          [&](int) { return count; },
          out.dtype(),
          op);
    }
  }

  Communicator& host_;
  std::unique_ptr<Communicator> owned_;
  std::shared_ptr<ExchangeStream> exchange_;
  ncclComm_t comm_;
  int rank_ = 0;
  int size_ = 1;
  std::string group_ = "world";  // as HostCommunicator counts them
  int splits_ = 0;
  std::uint64_t operations_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(Communicator& host,
                                                       Device device,
                                                       const DeviceCommOptions& options) {
  ncclComm_t comm = nullptr;
  cuda::use_device(device);
  if (host.size() > 1) {
    cuda::check_version();
    cuda::check_devices(host, device, options);
    ncclUniqueId id{};
    if (host.rank() == 0) MOESAIC_NCCL(ncclGetUniqueId(&id));
    std::string bytes(id.internal, sizeof id.internal);
    host.broadcast_host(bytes, 0);
    // Some MPI libraries finish a broadcast only inside a later call of theirs.
    host.barrier();
    std::memcpy(id.internal, bytes.data(), sizeof id.internal);
    MOESAIC_NCCL(ncclCommInitRank(&comm, host.size(), id, host.rank()));
  }
  // Called by the thread that watches; the main one may wait for ever for what failed.
  const auto fail = [&host](const std::string& what) {
    host.abort(static_cast<int>(ExitCode::internal), what);
  };
  auto exchange =
      std::make_shared<ExchangeStream>(device, options.reduction, options.activity, fail);
  auto world = std::make_unique<NcclCommunicator>(host, nullptr, std::move(exchange), comm);
  if (comm != nullptr) world->connect();
  return world;
}

bool has_device_communicator() noexcept {
  return true;
}

std::string device_communicator_version() {
  int version = 0;
  MOESAIC_NCCL(ncclGetVersion(&version));
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

// The library's share as two ranks of an H200 machine leave it; it grows with the peers.
std::size_t device_communication_bytes(int ranks) noexcept {
  if (ranks <= 1) return 0;
  constexpr std::size_t kLibraryBytes = std::size_t{400} << 20,
                        kPerPeerBytes = std::size_t{64} << 20;
  return static_cast<std::size_t>(kStagingBytes) + kLibraryBytes +
         static_cast<std::size_t>(ranks - 1) * kPerPeerBytes;
}

}  // namespace moesaic
