#include "comm/host_communicator.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "memory/owned.h"

namespace moesaic {
namespace {

// Reductions go through staging memory of at most this size, piece by piece, so that a large
// gradient does not need its own size again.
constexpr std::int64_t kStagingBytes = std::int64_t{8} << 20;

template <class T, class A>
A combine(A a, T b, ReduceOp op) {
  const auto v = static_cast<A>(b);
  switch (op) {
    case ReduceOp::sum:
      return a + v;
    case ReduceOp::max:
      return (a > v || a != a) ? a : v;  // a != a: NaN stays
    case ReduceOp::min:
      return (a < v || a != a) ? a : v;
  }
  return a;
}

template <class T, class A>
void combine_typed(std::byte* out,
                   std::span<const std::byte* const> in,
                   std::int64_t count,
                   ReduceOp op) {
  constexpr std::int64_t kBlock = 512;
  std::array<A, kBlock> acc;
  auto* y = reinterpret_cast<T*>(out);
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const std::int64_t n = std::min(kBlock, count - at);
    for (std::int64_t i = 0; i < n; ++i)
      acc[static_cast<std::size_t>(i)] = static_cast<A>(reinterpret_cast<const T*>(in[0])[at + i]);
    for (std::size_t p = 1; p < in.size(); ++p) {
      const T* x = reinterpret_cast<const T*>(in[p]) + at;
      if (op == ReduceOp::sum) {
        for (std::int64_t i = 0; i < n; ++i)
          acc[static_cast<std::size_t>(i)] += static_cast<A>(x[i]);
      } else {
        for (std::int64_t i = 0; i < n; ++i)
          acc[static_cast<std::size_t>(i)] = combine(acc[static_cast<std::size_t>(i)], x[i], op);
      }
    }
    for (std::int64_t i = 0; i < n; ++i)
      y[at + i] = static_cast<T>(acc[static_cast<std::size_t>(i)]);
  }
}

bool is_reducible(DType t) {
  return t == DType::f64 || t == DType::f32 || t == DType::bf16 || t == DType::i64 ||
         t == DType::i32;
}

void check_host(const ConstTensorView& view, const char* what) {
  MOESAIC_CHECK(
      view.device().kind == Device::Kind::cpu,
      fmt::format(
          "{} is on {}; this communicator moves host memory", what, to_string(view.device())));
}

void check_reducible(const ConstTensorView& view) {
  check_host(view, "reduced tensor");
  MOESAIC_CHECK(is_reducible(view.dtype()), fmt::format("cannot reduce {}", name(view.dtype())));
}

// Elements [begin, end) of n that rank r of `size` combines.
std::int64_t slice_begin(std::int64_t n, int size, int r) {
  return n / size * r + std::min<std::int64_t>(r, n % size);
}

}  // namespace

void combine_in_order(std::byte* out,
                      std::span<const std::byte* const> in,
                      std::int64_t count,
                      DType dtype,
                      ReduceOp op) {
  switch (dtype) {
    case DType::f64:
      return combine_typed<double, double>(out, in, count, op);
    case DType::f32:
      return combine_typed<float, float>(out, in, count, op);
    case DType::bf16:
      return combine_typed<bf16, float>(out, in, count, op);
    case DType::i64:
      return combine_typed<std::int64_t, std::int64_t>(out, in, count, op);
    case DType::i32:
      return combine_typed<std::int32_t, std::int32_t>(out, in, count, op);
    default:
      check_failed(__FILE__, __LINE__, "reducible dtype", name(dtype));
  }
}

AllToAllPlan AllToAllPlan::reversed() const {
  return {recv_rows, recv_offset, send_rows, send_offset, row_bytes};
}

void AllToAllPlan::check(int group_size, std::size_t in_bytes, std::size_t out_bytes) const {
  const auto n = static_cast<std::size_t>(group_size);
  MOESAIC_CHECK(send_rows.size() == n && send_offset.size() == n && recv_rows.size() == n &&
                    recv_offset.size() == n,
                fmt::format("all-to-all plan needs {} entries in each list", n));
  MOESAIC_CHECK(row_bytes > 0, "all-to-all plan without a row size");
  const auto in_rows = static_cast<std::int64_t>(in_bytes) / row_bytes;
  const auto out_rows = static_cast<std::int64_t>(out_bytes) / row_bytes;
  const auto inside = [](std::int64_t offset, std::int64_t rows, std::int64_t all) {
    return offset >= 0 && rows >= 0 && offset <= all && rows <= all - offset;
  };
  for (std::size_t p = 0; p < n; ++p) {
    MOESAIC_CHECK(inside(send_offset[p], send_rows[p], in_rows),
                  fmt::format("rows {} + {} for rank {} lie outside the {} input rows",
                              send_offset[p],
                              send_rows[p],
                              p,
                              in_rows));
    MOESAIC_CHECK(inside(recv_offset[p], recv_rows[p], out_rows),
                  fmt::format("rows {} + {} of rank {} lie outside the {} output rows",
                              recv_offset[p],
                              recv_rows[p],
                              p,
                              out_rows));
  }
}

void check_bounds(std::span<const std::int64_t> bounds, int group_size, std::int64_t elements) {
  MOESAIC_CHECK(bounds.size() == static_cast<std::size_t>(group_size) + 1,
                fmt::format("{} bounds for {} ranks", bounds.size(), group_size));
  MOESAIC_CHECK(bounds.front() == 0 && bounds.back() == elements &&
                    std::is_sorted(bounds.begin(), bounds.end()),
                fmt::format("bounds do not cut {} elements into parts", elements));
}

void Communicator::send(ConstTensorView in, int peer, Stream& stream) {
  const OutgoingMessage message{in, peer};
  exchange({&message, 1}, {}, stream);
}

void Communicator::recv(TensorView out, int peer, Stream& stream) {
  const IncomingMessage message{out, peer};
  exchange({}, {&message, 1}, stream);
}

// Used by the communication thread only.
struct HostCommunicator::Staging {
  Buffer buffer;
  std::byte* reserve(std::int64_t bytes) {
    if (static_cast<std::int64_t>(buffer.bytes()) < bytes) {
      buffer = Buffer(static_cast<std::size_t>(bytes), kCpu, "communication staging");
    }
    return buffer.data();
  }
};

namespace {

// Combines elements [begin, begin + count) of every rank's `in` (which starts for destination p at
// source(p)) into `out` of this rank; `share(p)` = number of elements that rank p combines.
struct PieceReducer {
  HostTransport& transport;
  std::byte* staging;
  DType dtype;
  ReduceOp op;

  template <class Source, class Share>
  void operator()(std::byte* out, const Source& source, const Share& share) const {
    const auto element = static_cast<std::int64_t>(byte_size(dtype));
    const int size = transport.size();
    const std::int64_t mine = share(transport.rank());
    std::vector<SendBlock> sends;
    std::vector<RecvBlock> receives;
    std::vector<const std::byte*> parts;
    for (int p = 0; p < size; ++p) {
      sends.push_back({source(p), share(p) * element});
      receives.push_back({staging + p * mine * element, mine * element});
      parts.push_back(receives.back().data);
    }
    transport.all_to_all(sends, receives);
    combine_in_order(out, parts, mine, dtype, op);
  }
};

// Every rank's own block of `data` (starting at offset(p), share(p) bytes) to all ranks.
template <class Offset, class Share>
void gather_blocks(HostTransport& t,
                   std::byte* data,
                   const std::byte* own,
                   const Offset& offset,
                   const Share& share) {
  std::vector<SendBlock> sends(static_cast<std::size_t>(t.size()), SendBlock{own, share(t.rank())});
  std::vector<RecvBlock> receives;
  for (int p = 0; p < t.size(); ++p)
    receives.push_back({data + offset(p), share(p)});
  t.all_to_all(sends, receives);
}

void ordered_all_reduce(HostTransport& t,
                        std::byte* data,
                        std::int64_t n,
                        DType dtype,
                        ReduceOp op,
                        std::byte* staging) {
  const auto element = static_cast<std::int64_t>(byte_size(dtype));
  const std::int64_t piece = kStagingBytes / element / t.size();
  for (std::int64_t at = 0; at < n; at += piece * t.size()) {
    const std::int64_t count = std::min(n - at, piece * t.size());
    std::byte* base = data + at * element;
    const auto begin = [&](int p) { return slice_begin(count, t.size(), p); };
    const auto share = [&](int p) { return begin(p + 1) - begin(p); };
    std::byte* mine = base + begin(t.rank()) * element;
    PieceReducer{t, staging, dtype, op}(
        mine, [&](int p) { return base + begin(p) * element; }, share);
    gather_blocks(
        t,
        base,
        mine,
        [&](int p) { return begin(p) * element; },
        [&](int p) { return share(p) * element; });
  }
}

std::int64_t staging_for(std::int64_t elements, DType dtype) {
  return std::min(kStagingBytes, elements * static_cast<std::int64_t>(byte_size(dtype)) + 4096);
}

}  // namespace

HostCommunicator::HostCommunicator(std::shared_ptr<CommQueue> queue,
                                   std::unique_ptr<HostTransport> transport,
                                   const CommOptions& options)
    : queue_(std::move(queue)),
      transport_(std::move(transport)),
      staging_(std::make_shared<Staging>()),
      options_(options),
      rank_(transport_->rank()),
      size_(transport_->size()),
      name_(transport_->name()) {}

HostCommunicator::~HostCommunicator() {
  // The transport is released by the thread that uses it, after the operations in flight.
  try {
    queue_->run([t = std::exchange(transport_, nullptr)]() mutable { t.reset(); });
  } catch (...) {
    log_teardown_failure(static_cast<int>(ExitCode::internal));
  }
}

Exchange HostCommunicator::describe(const char* operation, std::int64_t bytes) {
  Exchange what;
  what.operation = operation;
  group_.copy(what.group.data(), what.group.size() - 1);
  what.number_in_group = ++operations_;
  what.bytes = bytes;
  what.ranks = size_;
  return what;
}

std::unique_ptr<Communicator> HostCommunicator::split(int color, int key) {
  std::unique_ptr<HostTransport> part;
  queue_->run([&] { part = transport_->split(color, key); }, describe("split", 0));
  ++splits_;
  if (!part) return nullptr;
  auto made = make(std::move(part));
  made->group_ = fmt::format("{}/{}:{}", group_, splits_, color);
  return made;
}

void HostCommunicator::all_reduce(TensorView inout, ReduceOp op, Stream& stream) {
  check_reducible(inout);
  if (size_ == 1 || inout.numel() == 0) return;
  queue_->run_in_stream(
      stream,
      [t = transport_, s = staging_, inout, op, how = options_.reduction] {
        const auto n = inout.numel();
        if (how == Reduction::library && t->library_all_reduce(inout.data(), n, inout.dtype(), op))
          return;
        ordered_all_reduce(
            *t, inout.data(), n, inout.dtype(), op, s->reserve(staging_for(n, inout.dtype())));
      },
      describe("all_reduce", static_cast<std::int64_t>(inout.bytes())));
}

void HostCommunicator::reduce_scatter(TensorView out,
                                      ConstTensorView in,
                                      ReduceOp op,
                                      Stream& stream) {
  check_reducible(in);
  check_dtype(out, in.dtype(), "reduce-scatter output");
  check_host(out, "reduce-scatter output");
  MOESAIC_CHECK(in.numel() == out.numel() * size_,
                "reduce-scatter input must be size() times the output");
  if (size_ == 1) {
    if (out.data() != in.data()) copy_tensor(out, in.reshaped(out.shape()), stream);
    return;
  }
  queue_->run_in_stream(
      stream,
      [t = transport_, s = staging_, out, in, op] {
        const std::int64_t n = out.numel();
        const auto element = static_cast<std::int64_t>(byte_size(out.dtype()));
        const std::int64_t piece = kStagingBytes / element / t->size();
        std::byte* staging = s->reserve(staging_for(in.numel(), in.dtype()));
        for (std::int64_t at = 0; at < n; at += piece) {
          const std::int64_t count = std::min(piece, n - at);
          PieceReducer{*t, staging, out.dtype(), op}(
              out.data() + at * element,
              [&](int p) { return in.data() + (p * n + at) * element; },
              [&](int) { return count; });
        }
      },
      describe("reduce_scatter", static_cast<std::int64_t>(in.bytes())));
}

void HostCommunicator::all_gather(TensorView out, ConstTensorView in, Stream& stream) {
  check_host(out, "all-gather output");
  check_host(in, "all-gather input");
  check_dtype(out, in.dtype(), "all-gather output");
  MOESAIC_CHECK(out.numel() == in.numel() * size_,
                "all-gather output must be size() times the input");
  if (size_ == 1) {
    if (out.data() != in.data()) copy_tensor(out, in.reshaped(out.shape()), stream);
    return;
  }
  queue_->run_in_stream(
      stream,
      [t = transport_, out, in] {
        const auto bytes = static_cast<std::int64_t>(in.bytes());
        gather_blocks(
            *t,
            out.data(),
            in.data(),
            [&](int p) { return p * bytes; },
            [&](int) { return bytes; });
      },
      describe("all_gather", static_cast<std::int64_t>(in.bytes())));
}

void HostCommunicator::reduce_to_owners(TensorView inout,
                                        std::span<const std::int64_t> bounds,
                                        ReduceOp op,
                                        Stream& stream) {
  check_reducible(inout);
  check_bounds(bounds, size_, inout.numel());
  if (size_ == 1 || inout.numel() == 0) return;
  queue_->run_in_stream(
      stream,
      [t = transport_,
       s = staging_,
       inout,
       op,
       cuts = std::vector<std::int64_t>(bounds.begin(), bounds.end())] {
        const auto element = static_cast<std::int64_t>(byte_size(inout.dtype()));
        const std::int64_t piece = kStagingBytes / element / t->size();
        const auto begin = [&](int p) { return cuts[static_cast<std::size_t>(p)]; };
        const auto length = [&](int p) { return begin(p + 1) - begin(p); };
        std::int64_t longest = 0;
        for (int p = 0; p < t->size(); ++p)
          longest = std::max(longest, length(p));
        std::byte* staging =
            s->reserve(staging_for(std::min(piece, longest) * t->size(), inout.dtype()));
        // The parts advance together; short ones are done before the others.
        for (std::int64_t at = 0; at < longest; at += piece) {
          const auto from = [&](int p) {
            return inout.data() + (begin(p) + std::min(at, length(p))) * element;
          };
          PieceReducer{*t, staging, inout.dtype(), op}(from(t->rank()), from, [&](int p) {
            return std::clamp<std::int64_t>(length(p) - at, 0, piece);
          });
        }
      },
      describe("reduce_to_owners", static_cast<std::int64_t>(inout.bytes())));
}

void HostCommunicator::gather_from_owners(TensorView inout,
                                          std::span<const std::int64_t> bounds,
                                          Stream& stream) {
  check_host(inout, "gathered tensor");
  check_bounds(bounds, size_, inout.numel());
  if (size_ == 1 || inout.numel() == 0) return;
  queue_->run_in_stream(
      stream,
      [t = transport_, inout, cuts = std::vector<std::int64_t>(bounds.begin(), bounds.end())] {
        const auto element = static_cast<std::int64_t>(byte_size(inout.dtype()));
        const auto offset = [&](int p) { return cuts[static_cast<std::size_t>(p)] * element; };
        gather_blocks(*t, inout.data(), inout.data() + offset(t->rank()), offset, [&](int p) {
          return offset(p + 1) - offset(p);
        });
      },
      describe("gather_from_owners", static_cast<std::int64_t>(inout.bytes())));
}

void HostCommunicator::all_to_all(TensorView out,
                                  ConstTensorView in,
                                  const AllToAllPlan& plan,
                                  Stream& stream) {
  check_host(out, "all-to-all output");
  check_host(in, "all-to-all input");
  plan.check(size_, in.bytes(), out.bytes());
  queue_->run_in_stream(
      stream,
      [t = transport_, out, in, plan] {
        std::vector<SendBlock> sends;
        std::vector<RecvBlock> receives;
        for (std::size_t p = 0; p < plan.send_rows.size(); ++p) {
          sends.push_back({in.data() + plan.send_offset[p] * plan.row_bytes,
                           plan.send_rows[p] * plan.row_bytes});
          receives.push_back({out.data() + plan.recv_offset[p] * plan.row_bytes,
                              plan.recv_rows[p] * plan.row_bytes});
        }
        t->all_to_all(sends, receives);
      },
      describe("all_to_all",
               std::accumulate(plan.send_rows.begin(), plan.send_rows.end(), std::int64_t{0}) *
                   plan.row_bytes));
}

void HostCommunicator::broadcast(TensorView inout, int root, Stream& stream) {
  check_host(inout, "broadcast tensor");
  MOESAIC_CHECK(0 <= root && root < size_, fmt::format("no rank {} in a group of {}", root, size_));
  if (size_ == 1 || inout.numel() == 0) return;
  queue_->run_in_stream(
      stream,
      [t = transport_, inout, root] {
        t->broadcast(inout.data(), static_cast<std::int64_t>(inout.bytes()), root);
      },
      describe("broadcast", static_cast<std::int64_t>(inout.bytes())));
}

void HostCommunicator::exchange(std::span<const OutgoingMessage> sends,
                                std::span<const IncomingMessage> receives,
                                Stream& stream) {
  std::vector<HostTransport::Send> out;
  std::vector<HostTransport::Receive> in;
  std::int64_t bytes = 0;
  const auto check_peer = [&](int peer) {
    MOESAIC_CHECK(
        0 <= peer && peer < size_ && peer != rank_,
        fmt::format("rank {} of {} cannot exchange messages with rank {}", rank_, size_, peer));
  };
  for (const auto& m : sends) {
    check_host(m.data, "message");
    check_peer(m.peer);
    out.push_back({{m.data.data(), static_cast<std::int64_t>(m.data.bytes())}, m.peer});
    bytes += out.back().block.bytes;
  }
  for (const auto& m : receives) {
    check_host(m.data, "message");
    check_peer(m.peer);
    in.push_back({{m.data.data(), static_cast<std::int64_t>(m.data.bytes())}, m.peer});
    bytes += in.back().block.bytes;
  }
  queue_->run_in_stream(
      stream,
      [t = transport_, out = std::move(out), in = std::move(in)] { t->exchange(out, in); },
      describe("exchange", bytes));
}

void HostCommunicator::barrier() {
  queue_->run([&] { transport_->barrier(); }, describe("barrier", 0));
}

namespace {
template <class T>
T reduce_value(CommQueue& queue, HostTransport& t, const Exchange& what, T value, ReduceOp op) {
  std::vector<T> all(static_cast<std::size_t>(t.size()));
  queue.run(
      [&] {
        gather_blocks(
            t,
            reinterpret_cast<std::byte*>(all.data()),
            reinterpret_cast<const std::byte*>(&value),
            [](int p) { return p * static_cast<std::int64_t>(sizeof(T)); },
            [](int) { return static_cast<std::int64_t>(sizeof(T)); });
      },
      what);
  T result = all[0];
  for (std::size_t p = 1; p < all.size(); ++p)
    result = combine(result, all[p], op);
  return result;
}
}  // namespace

double HostCommunicator::all_reduce_host(double value, ReduceOp op) {
  return reduce_value(*queue_, *transport_, describe("all_reduce_host", 8), value, op);
}
std::int64_t HostCommunicator::all_reduce_host(std::int64_t value, ReduceOp op) {
  return reduce_value(*queue_, *transport_, describe("all_reduce_host", 8), value, op);
}

void HostCommunicator::broadcast_host(std::string& bytes, int root) {
  MOESAIC_CHECK(0 <= root && root < size_, fmt::format("no rank {} in a group of {}", root, size_));
  queue_->run(
      [&] {
        auto length = static_cast<std::int64_t>(bytes.size());
        transport_->broadcast(reinterpret_cast<std::byte*>(&length), sizeof length, root);
        bytes.resize(static_cast<std::size_t>(length));
        if (length > 0)
          transport_->broadcast(reinterpret_cast<std::byte*>(bytes.data()), length, root);
      },
      describe("broadcast_host", static_cast<std::int64_t>(bytes.size())));
}

std::vector<std::string> HostCommunicator::all_gather_host(const std::string& bytes) {
  std::vector<std::string> result(static_cast<std::size_t>(size_));
  queue_->run(
      [&] {
        std::vector<std::int64_t> lengths(result.size());
        const auto own = static_cast<std::int64_t>(bytes.size());
        constexpr auto kBytes = static_cast<std::int64_t>(sizeof own);
        gather_blocks(
            *transport_,
            reinterpret_cast<std::byte*>(lengths.data()),
            reinterpret_cast<const std::byte*>(&own),
            [](int p) { return p * kBytes; },
            [](int) { return kBytes; });
        std::vector<SendBlock> sends(
            result.size(), SendBlock{reinterpret_cast<const std::byte*>(bytes.data()), own});
        std::vector<RecvBlock> receives;
        for (std::size_t p = 0; p < result.size(); ++p) {
          result[p].resize(static_cast<std::size_t>(lengths[p]));
          receives.push_back({reinterpret_cast<std::byte*>(result[p].data()), lengths[p]});
        }
        transport_->all_to_all(sends, receives);
      },
      describe("all_gather_host", static_cast<std::int64_t>(bytes.size())));
  return result;
}

}  // namespace moesaic
