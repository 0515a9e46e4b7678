// Cases about what is moved: how many rows to whom, of which type, how much.
#include <numeric>

#include "core/base/random.h"
#include "tests/comm/conformance_support.h"

namespace moesaic::test {
namespace {

using Rows = std::vector<std::vector<std::int64_t>>;  // [from][to]

AllToAllPlan plan_of(const Rows& rows, int rank, std::int64_t row_bytes) {
  AllToAllPlan plan;
  plan.row_bytes = row_bytes;
  std::int64_t out = 0, in = 0;
  for (std::size_t p = 0; p < rows.size(); ++p) {
    const std::int64_t send = rows[static_cast<std::size_t>(rank)][p],
                       receive = rows[p][static_cast<std::size_t>(rank)];
    plan.send_rows.push_back(send);
    plan.send_offset.push_back(out);
    plan.recv_rows.push_back(receive);
    plan.recv_offset.push_back(in);
    out += send;
    in += receive;
  }
  return plan;
}

// Byte i of what `from` sends to `to`.
std::uint8_t byte_of(int from, int to, std::int64_t i) {
  return static_cast<std::uint8_t>(from * 37 + to * 11 + i * 7 + i / 251);
}

void move_rows(Communicator& comm, Device device, const Rows& rows, std::int64_t row_bytes) {
  const auto plan = plan_of(rows, comm.rank(), row_bytes);
  const auto bytes_of = [&](const std::vector<std::int64_t>& counts) {
    return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) *
                                    row_bytes);
  };
  std::vector<std::uint8_t> in, wanted;
  for (int p = 0; p < comm.size(); ++p) {
    const auto i = static_cast<std::size_t>(p);
    for (std::int64_t b = 0; b < plan.send_rows[i] * row_bytes; ++b)
      in.push_back(byte_of(comm.rank(), p, b));
    for (std::int64_t b = 0; b < plan.recv_rows[i] * row_bytes; ++b)
      wanted.push_back(byte_of(p, comm.rank(), b));
  }
  expect(in.size() == bytes_of(plan.send_rows), "a wrong test");
  Stream stream(device, "test");
  using Bytes = std::vector<std::uint8_t>;
  Values<std::uint8_t> sent(in, device), received(Bytes(wanted.size(), 0xee), device),
      returned(Bytes(in.size(), 0xee), device);
  comm.all_to_all(received.view(), sent.view(), plan, stream);
  comm.all_to_all(returned.view(), received.view(), plan.reversed(), stream);
  stream.synchronize();
  expect_equal(received.get(), wanted, "rows");
  expect_equal(returned.get(), in, "rows, there and back");
}

// Drawn alike on all ranks: routing that is even, skewed to one rank, from one rank, sparse, or empty.
void all_to_all_of_any_shape(Communicator& comm, Device device) {
  const auto size = static_cast<std::size_t>(comm.size());
  for (std::uint64_t round = 0; round < 8; ++round) {
    Rows rows(size, std::vector<std::int64_t>(size, 0));
    for (std::size_t from = 0; from < size; ++from) {
      for (std::size_t to = 0; to < size; ++to) {
        const double u = uniform(91 + round, from * size + to);
        const bool hot = to == round % size, source = from == round % size;
        const auto draw = static_cast<std::int64_t>(u * 400);
        rows[from][to] = round < 2   ? draw
                         : round < 4 ? (hot ? 20 * draw : draw / 100)
                         : round < 5 ? (source ? draw : 0)
                         : round < 7 ? (u < 0.3 ? draw : 0)
                                     : 0;
      }
    }
    move_rows(comm, device, rows, round % 2 == 0 ? 16 : 7);
  }
}

// Nothing to move is no message, on both sides; what follows is not disturbed.
void nothing_to_move(Communicator& comm, Device device) {
  Stream stream(device, "test");
  Values<float> some({1.0F, 2.0F}, device);
  const auto none = some.view().rows(0, 0);
  for (int round = 0; round < 3; ++round) {
    comm.all_reduce(none, ReduceOp::sum, stream);
    comm.reduce_scatter(none, none, ReduceOp::sum, stream);
    comm.all_gather(none, none, stream);
    comm.broadcast(none, comm.size() - 1, stream);
    comm.exchange({}, {}, stream);
    if (comm.size() > 1) {
      const int next = (comm.rank() + 1) % comm.size(),
                previous = (comm.rank() + comm.size() - 1) % comm.size();
      const OutgoingMessage empty{none, next};
      const IncomingMessage from{none, previous};
      comm.exchange({&empty, 1}, {&from, 1}, stream);
    }
    comm.all_reduce(some.view(), ReduceOp::max, stream);
  }
  stream.synchronize();
  expect_equal(some.get(), std::vector<float>{1.0F, 2.0F}, "after empty operations");
}

// Whatever moves bytes takes every type, also those without arithmetic.
void every_dtype_is_moved(Communicator& comm, Device device) {
  Stream stream(device, "test");
  const int size = comm.size(), next = (comm.rank() + 1) % size,
            previous = (comm.rank() + size - 1) % size;
  for (const DType dtype : {DType::f64,
                            DType::f32,
                            DType::bf16,
                            DType::f16,
                            DType::e4m3,
                            DType::e5m2,
                            DType::i64,
                            DType::i32,
                            DType::u8,
                            DType::u16}) {
    constexpr std::int64_t kCount = 37;
    const auto bytes = kCount * static_cast<std::int64_t>(byte_size(dtype));
    const auto of = [&](int rank) {
      std::vector<std::uint8_t> v(static_cast<std::size_t>(bytes));
      for (std::int64_t i = 0; i < bytes; ++i)
        v[static_cast<std::size_t>(i)] = byte_of(rank, static_cast<int>(dtype), i);
      return v;
    };
    const auto as = [&](const TensorView& v, std::int64_t n) {
      return TensorView(v.data(), dtype, {n}, device);
    };
    Values<std::uint8_t> own(of(comm.rank()), device), sent(of(comm.rank()), device),
        got(std::vector<std::uint8_t>(static_cast<std::size_t>(bytes)), device),
        all(std::vector<std::uint8_t>(static_cast<std::size_t>(bytes * size)), device);
    comm.all_gather(as(all.view(), kCount * size), as(own.view(), kCount), stream);
    if (size > 1) {
      const OutgoingMessage out{as(own.view(), kCount), next};
      const IncomingMessage in{as(got.view(), kCount), previous};
      comm.exchange({&out, 1}, {&in, 1}, stream);
    }
    comm.broadcast(as(sent.view(), kCount), size - 1, stream);
    stream.synchronize();
    std::vector<std::uint8_t> wanted;
    for (int r = 0; r < size; ++r) {
      const auto part = of(r);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    expect_equal(all.get(), wanted, "all_gather of every dtype");
    if (size > 1) expect_equal(got.get(), of(previous), "message of every dtype");
    expect_equal(sent.get(), of(size - 1), "broadcast of every dtype");
  }
}

constexpr ConformanceCase kMoves[] = {
    {"all_to_all of any shape", all_to_all_of_any_shape},
    {"nothing to move", nothing_to_move},
    {"every dtype is moved", every_dtype_is_moved},
};

// Memory of more than 2 GiB that is filled and looked at in pieces.
class LargeBlock {
 public:
  static constexpr std::int64_t kWords = (std::int64_t{2} << 30) / 8 + 4321;
  explicit LargeBlock(Device device)
      : stream_(device, "large"), memory_(kWords * 8, device, "large test") {}
  TensorView words(std::int64_t begin, std::int64_t end) const {
    return memory_.view({kWords}, DType::i64).rows(begin, end);
  }
  static std::int64_t word(int rank, std::int64_t i) {
    return static_cast<std::int64_t>(
        mix64(static_cast<std::uint64_t>(2 * i) + static_cast<std::uint64_t>(rank)));
  }
  void fill(int rank, std::int64_t begin, std::int64_t end) {
    in_pieces(begin, end, [&](TensorView there, TensorView here, std::int64_t at) {
      for (std::int64_t i = 0; i < here.numel(); ++i)
        here.as<std::int64_t>()[i] = word(rank, at + i);
      copy_tensor(there, here, stream_);
      stream_.synchronize();
    });
  }
  /// Words [begin, end) are those that `rank` numbers from `first` on.
  void check(int rank, std::int64_t begin, std::int64_t end, std::int64_t first, const char* what) {
    in_pieces(begin, end, [&](TensorView there, TensorView here, std::int64_t at) {
      copy_tensor(here, there, stream_);
      stream_.synchronize();
      for (std::int64_t i = 0; i < here.numel(); ++i) {
        const bool is_right = here.as<std::int64_t>()[i] == word(rank, first + at - begin + i);
        if (!is_right) expect(false, fmt::format("{}: word {} is wrong", what, at + i));
      }
    });
  }

 private:
  template <class F>
  void in_pieces(std::int64_t begin, std::int64_t end, const F& f) {
    constexpr std::int64_t kPiece = std::int64_t{1} << 21;
    std::vector<std::int64_t> host(static_cast<std::size_t>(kPiece));
    for (std::int64_t at = begin; at < end; at += kPiece) {
      const std::int64_t n = std::min(kPiece, end - at);
      f(words(at, at + n),
        TensorView(reinterpret_cast<std::byte*>(host.data()), DType::i64, {n}),
        at);
    }
  }
  Stream stream_;
  Buffer memory_;
};

void large_messages(Communicator& comm, Device device) {
  expect(comm.size() == 2, "large messages are for two ranks");
  Stream stream(device, "test");
  constexpr std::int64_t n = LargeBlock::kWords;
  LargeBlock block(device);
  const int rank = comm.rank();
  // One message, to rank 1.
  block.fill(rank, 0, n);
  if (rank == 0) {
    comm.send(block.words(0, n), 1, stream);
  } else {
    comm.recv(block.words(0, n), 0, stream);
  }
  stream.synchronize();
  block.check(0, 0, n, 0, "message");
  // As rows of an all-to-all, back to rank 0; rank 0 keeps some, so that offsets pass 2 GiB, too.
  block.fill(rank, 0, n);
  AllToAllPlan plan;
  plan.row_bytes = 8;
  const auto rows = [&](std::int64_t a, std::int64_t b) { return std::vector<std::int64_t>{a, b}; };
  plan.send_rows = rank == 0 ? rows(0, 0) : rows(n, 0);
  plan.recv_rows = rank == 0 ? rows(0, n) : rows(0, 0);
  plan.send_offset = plan.recv_offset = rows(0, 0);
  const auto none = block.words(0, 0);
  comm.all_to_all(
      rank == 0 ? block.words(0, n) : none, rank == 0 ? none : block.words(0, n), plan, stream);
  stream.synchronize();
  block.check(1, 0, n, 0, "all_to_all");
  // From one to all.
  block.fill(rank, 0, n);
  comm.broadcast(block.words(0, n), 1, stream);
  stream.synchronize();
  block.check(1, 0, n, 0, "broadcast");
}

// A result of more than 2 GiB, and a sum of as much.
void large_collectives(Communicator& comm, Device device) {
  expect(comm.size() == 2, "large collectives are for two ranks");
  Stream stream(device, "test");
  constexpr std::int64_t half = LargeBlock::kWords / 2, n = 2 * half;
  LargeBlock block(device);
  const int rank = comm.rank();
  block.fill(rank, rank * half, (rank + 1) * half);
  comm.all_gather(block.words(0, n), block.words(rank * half, (rank + 1) * half), stream);
  stream.synchronize();
  for (int r = 0; r < 2; ++r)
    block.check(r, r * half, (r + 1) * half, r * half, "all_gather");
  block.fill(rank, 0, n);
  comm.all_reduce(block.words(0, n), ReduceOp::min, stream);
  stream.synchronize();
  std::vector<std::int64_t> some(4);
  const TensorView here(reinterpret_cast<std::byte*>(some.data()), DType::i64, {4});
  for (const std::int64_t at : {std::int64_t{0}, half - 2, n - 4}) {
    copy_tensor(here, block.words(at, at + 4), stream);
    stream.synchronize();
    for (std::int64_t i = 0; i < 4; ++i)
      expect(some[static_cast<std::size_t>(i)] ==
                 std::min(LargeBlock::word(0, at + i), LargeBlock::word(1, at + i)),
             "all_reduce of 2 GiB");
  }
}

constexpr ConformanceCase kLarge[] = {
    {"messages beyond 2 GiB", large_messages},
    {"collectives beyond 2 GiB", large_collectives},
};

}  // namespace

std::span<const ConformanceCase> move_cases() {
  return kMoves;
}
std::span<const ConformanceCase> large_cases() {
  return kLarge;
}

}  // namespace moesaic::test
