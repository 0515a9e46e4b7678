#include "tests/comm/conformance.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "core/base/random.h"
#include "tests/comm/conformance_support.h"

namespace moesaic::test {
namespace {

// Values whose sum depends on the order of addition.
template <class T>
std::vector<T> values_of_rank(int rank, std::size_t n) {
  std::vector<T> v(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double x = standard_normal(77 + static_cast<std::uint64_t>(rank), i);
    const double scale =
        std::is_integral_v<T> ? 1000.0 : std::ldexp(1.0, static_cast<int>(i % 23) * (rank % 3));
    v[i] = static_cast<T>(x * scale);
  }
  return v;
}
template <class T>
std::vector<T> reduced(int size, std::size_t n, ReduceOp op) {
  using A = std::conditional_t<std::is_integral_v<T>, T, acc_t<T>>;
  std::vector<A> acc;
  for (int r = 0; r < size; ++r) {
    const auto v = values_of_rank<T>(r, n);
    if (r == 0) {
      acc.assign(v.begin(), v.end());
      continue;
    }
    for (std::size_t i = 0; i < n; ++i) {
      const A x = static_cast<A>(v[i]);
      acc[i] = op == ReduceOp::sum   ? acc[i] + x
               : op == ReduceOp::max ? std::max(acc[i], x)
                                     : std::min(acc[i], x);
    }
  }
  std::vector<T> out;
  for (const A a : acc)
    out.push_back(static_cast<T>(a));
  return out;
}

template <class T>
void all_reduce_type(Communicator& comm, Device device, Stream& stream) {
  for (const auto op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
    for (const std::size_t n :
         {std::size_t{1}, std::size_t{3}, std::size_t{1000}, std::size_t{4097}}) {
      Values<T> v(values_of_rank<T>(comm.rank(), n), device);
      comm.all_reduce(v.view(), op, stream);
      stream.synchronize();
      expect_equal(v.get(), reduced<T>(comm.size(), n, op), "all_reduce");
    }
  }
}

void all_reduce_is_ordered(Communicator& comm, Device device) {
  Stream stream(device, "test");
  all_reduce_type<double>(comm, device, stream);
  all_reduce_type<float>(comm, device, stream);
  all_reduce_type<bf16>(comm, device, stream);
  all_reduce_type<std::int64_t>(comm, device, stream);
  all_reduce_type<std::int32_t>(comm, device, stream);
}

void all_reduce_larger_than_staging(Communicator& comm, Device device) {
  Stream stream(device, "test");
  // Staging holds 8 MiB on the host, 64 MiB on a device.
  const std::size_t bytes = std::size_t{device == kCpu ? 9U : 70U} << 20,
                    n = bytes / sizeof(double) + 5;
  Values<double> v(values_of_rank<double>(comm.rank(), n), device);
  comm.all_reduce(v.view(), ReduceOp::sum, stream);
  stream.synchronize();
  expect_equal(v.get(), reduced<double>(comm.size(), n, ReduceOp::sum), "all_reduce in pieces");
}

// The same elements reduced alone, in parts, or as one tensor have the same bits.
void reduction_does_not_depend_on_buckets(Communicator& comm, Device device) {
  Stream stream(device, "test");
  const std::size_t n = 1234;
  Values<float> whole(values_of_rank<float>(comm.rank(), n), device);
  Values<float> parts(values_of_rank<float>(comm.rank(), n), device);
  comm.all_reduce(whole.view(), ReduceOp::sum, stream);
  const auto all = parts.view();
  std::int64_t at = 0;
  for (const std::int64_t length : {1, 7, 500, 26, 700}) {
    comm.all_reduce(all.rows(at, at + length), ReduceOp::sum, stream);
    at += length;
  }
  stream.synchronize();
  expect_equal(parts.get(), whole.get(), "buckets");
}

void nan_and_negative_zero(Communicator& comm, Device device) {
  Stream stream(device, "test");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> some{
      comm.rank() == 0 ? nan : 1.0F, comm.rank() == comm.size() - 1 ? nan : 1.0F, -0.0F};
  Values<float> highest(some, device), lowest(some, device), zeros({-0.0F}, device);
  comm.all_reduce(highest.view(), ReduceOp::max, stream);
  comm.all_reduce(lowest.view(), ReduceOp::min, stream);
  comm.all_reduce(zeros.view(), ReduceOp::sum, stream);
  stream.synchronize();
  const auto v = highest.get(), low = lowest.get(), zero = zeros.get();
  expect(std::isnan(v[0]) && std::isnan(v[1]) && std::isnan(low[0]) && std::isnan(low[1]),
         "NaN was lost");
  expect(std::signbit(zero[0]), "-0 + -0 must stay -0");
}

void reduce_scatter_and_all_gather(Communicator& comm, Device device) {
  Stream stream(device, "test");
  const std::size_t n = 333;
  const auto size = static_cast<std::size_t>(comm.size());
  const auto values = values_of_rank<float>(comm.rank(), n * size);
  Values<float> in(values, device), same(values, device), out(std::vector<float>(n), device),
      gathered(std::vector<float>(n * size), device);
  comm.reduce_scatter(out.view(), in.view(), ReduceOp::sum, stream);
  comm.all_gather(gathered.view(), out.view(), stream);
  // In place, as the sharded optimizer does it.
  const auto all = same.view();
  const std::int64_t begin = comm.rank() * static_cast<std::int64_t>(n);
  const auto own = all.rows(begin, begin + static_cast<std::int64_t>(n));
  comm.reduce_scatter(own, all, ReduceOp::sum, stream);
  comm.all_gather(all, own, stream);
  stream.synchronize();
  const auto wanted = reduced<float>(comm.size(), n * size, ReduceOp::sum);
  expect_equal(gathered.get(), wanted, "reduce_scatter + all_gather");
  expect_equal(same.get(), wanted, "in place");
}

// Parts of every length, none among them, and more than staging holds.
template <class T>
void owners_of_type(Communicator& comm, Device device, std::size_t n) {
  Stream stream(device, "test");
  const auto size = static_cast<std::size_t>(comm.size());
  for (const bool first_owns_all : {false, true}) {
    std::vector<std::int64_t> bounds{0};
    for (std::size_t p = 1; p < size; ++p)  // rank 0 gets least, the last most, some nothing
      bounds.push_back(static_cast<std::int64_t>(
          first_owns_all ? n : (p % 2 == 0 ? bounds.back() : n * p * p / (size * size))));
    bounds.push_back(static_cast<std::int64_t>(n));
    for (const auto op : {ReduceOp::sum, ReduceOp::max}) {
      Values<T> v(values_of_rank<T>(comm.rank(), n), device);
      comm.reduce_to_owners(v.view(), bounds, op, stream);
      stream.synchronize();
      const auto wanted = reduced<T>(comm.size(), n, op);
      const auto me = static_cast<std::size_t>(comm.rank());
      const auto part = [&](const std::vector<T>& all) {
        return std::vector<T>(all.begin() + bounds[me], all.begin() + bounds[me + 1]);
      };
      expect_equal(part(v.get()), part(wanted), "reduce_to_owners");
      comm.gather_from_owners(v.view(), bounds, stream);
      stream.synchronize();
      expect_equal(v.get(), wanted, "gather_from_owners");
    }
  }
}

void reduce_to_owners_and_gather(Communicator& comm, Device device) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{1001}}) {
    owners_of_type<double>(comm, device, n);
    owners_of_type<float>(comm, device, n);
    owners_of_type<bf16>(comm, device, n);
    owners_of_type<std::int64_t>(comm, device, n);
  }
  // One owner's staging holds 8 MiB from all ranks together on the host, 32 MiB on a device.
  const std::size_t bytes = std::size_t{device == kCpu ? 8U : 32U} << 20;
  owners_of_type<float>(
      comm, device, bytes / sizeof(float) / static_cast<std::size_t>(comm.size()) + 5);
}

// Rank r sends r + p + 1 rows to rank p, and nothing to the next rank.
AllToAllPlan uneven_plan(int rank, int size, std::int64_t row_bytes) {
  const auto rows = [&](int from, int to) -> std::int64_t {
    return to == (from + 1) % size && size > 1 ? 0 : from + to + 1;
  };
  AllToAllPlan plan;
  plan.row_bytes = row_bytes;
  std::int64_t out = 0, in = 0;
  for (int p = 0; p < size; ++p) {
    plan.send_rows.push_back(rows(rank, p));
    plan.send_offset.push_back(out);
    plan.recv_rows.push_back(rows(p, rank));
    plan.recv_offset.push_back(in);
    out += rows(rank, p);
    in += rows(p, rank);
  }
  return plan;
}

void all_to_all_and_back(Communicator& comm, Device device) {
  Stream stream(device, "test");
  constexpr std::int64_t kWidth = 5;
  const auto plan = uneven_plan(comm.rank(), comm.size(), kWidth * 4);
  const auto count = [](const std::vector<std::int64_t>& rows) {
    return static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}) *
                                    kWidth);
  };
  std::vector<std::int32_t> in(count(plan.send_rows));
  for (int p = 0; p < comm.size(); ++p) {
    const auto to = static_cast<std::size_t>(p);
    for (std::int64_t i = 0; i < plan.send_rows[to] * kWidth; ++i) {
      in[static_cast<std::size_t>(plan.send_offset[to] * kWidth + i)] =
          static_cast<std::int32_t>(comm.rank() * 10000 + p * 1000 + i);
    }
  }
  using Ints = std::vector<std::int32_t>;
  Values<std::int32_t> sent(in, device), received(Ints(count(plan.recv_rows), -1), device),
      returned(Ints(in.size(), -1), device);
  comm.all_to_all(received.view(), sent.view(), plan, stream);
  comm.all_to_all(returned.view(), received.view(), plan.reversed(), stream);
  stream.synchronize();
  const auto out = received.get();
  for (int p = 0; p < comm.size(); ++p) {
    const auto from = static_cast<std::size_t>(p);
    for (std::int64_t i = 0; i < plan.recv_rows[from] * kWidth; ++i) {
      expect(out[static_cast<std::size_t>(plan.recv_offset[from] * kWidth + i)] ==
                 p * 10000 + comm.rank() * 1000 + i,
             "a row arrived at a wrong place");
    }
  }
  expect_equal(returned.get(), in, "all_to_all there and back");
}

void broadcast_from_every_rank(Communicator& comm, Device device) {
  Stream stream(device, "test");
  for (int root = 0; root < comm.size(); ++root) {
    Values<double> v(values_of_rank<double>(comm.rank(), 700), device);
    comm.broadcast(v.view(), root, stream);
    stream.synchronize();
    expect_equal(v.get(), values_of_rank<double>(root, 700), "broadcast");
  }
}

void messages(Communicator& comm, Device device) {
  if (comm.size() == 1) return;
  Stream stream(device, "test");
  const int next = (comm.rank() + 1) % comm.size(),
            previous = (comm.rank() + comm.size() - 1) % comm.size();
  // A ring in one call, larger than any eager limit; two messages to one peer keep their order.
  Values<double> mine(values_of_rank<double>(comm.rank(), 50000), device),
      got(std::vector<double>(50000), device);
  Values<std::int32_t> tag({comm.rank()}, device), got_tag({-1}, device);
  const std::vector<OutgoingMessage> sends{{mine.view(), next}, {tag.view(), next}};
  const std::vector<IncomingMessage> receives{{got.view(), previous}, {got_tag.view(), previous}};
  comm.exchange(sends, receives, stream);
  stream.synchronize();
  expect_equal(got.get(), values_of_rank<double>(previous, 50000), "ring");
  expect(got_tag.get()[0] == previous, "second message");
  // A chain by send and recv: each rank adds its own element and hands all on.
  std::vector<std::int64_t> own(static_cast<std::size_t>(comm.size()), -1);
  own[static_cast<std::size_t>(comm.rank())] = 10 * comm.rank();
  Values<std::int64_t> chain(own, device);
  if (comm.rank() > 0) comm.recv(chain.view().rows(0, comm.rank()), comm.rank() - 1, stream);
  if (comm.rank() + 1 < comm.size())
    comm.send(chain.view().rows(0, comm.rank() + 1), comm.rank() + 1, stream);
  stream.synchronize();
  const auto seen = chain.get();
  for (int r = 0; r < comm.size(); ++r)
    expect(seen[static_cast<std::size_t>(r)] == (r <= comm.rank() ? 10 * r : -1), "chain");
}

// Copies before and after an operation on its stream see the order.
void operations_follow_copies(Communicator& comm, Device device) {
  Stream stream(device, "test");
  constexpr std::size_t kCount = std::size_t{1} << 22;
  const auto filled = [&](std::int32_t v) { return std::vector<std::int32_t>(kCount, v); };
  Values<std::int32_t> source(filled(comm.rank() + 1), device), v(filled(0), device),
      seen(filled(0), device);
  for (int round = 0; round < 3; ++round) {
    copy_tensor(v.view(), source.view(), stream);
    comm.all_reduce(v.view(), ReduceOp::sum, stream);
    copy_tensor(seen.view(), v.view(), stream);
  }
  stream.synchronize();
  expect_equal(seen.get(), filled(comm.size() * (comm.size() + 1) / 2), "copies around");
}

// Work before and after an operation on its stream sees the order; the caller does not wait.
void operations_follow_their_stream(Communicator& comm, Device) {
  Stream stream(kCpu, "test");
  std::vector<std::int32_t> v(100, 0);
  std::atomic<bool> go{false};
  stream.enqueue([&] {
    while (!go)
      std::this_thread::yield();
    for (auto& x : v)
      x = comm.rank() + 1;
  });
  comm.all_reduce(view_of(v), ReduceOp::sum, stream);
  std::int32_t seen = 0;
  stream.enqueue([&] { seen = v[99]; });
  go = true;  // only reached if all_reduce() did not block the host
  stream.synchronize();
  expect(seen == comm.size() * (comm.size() + 1) / 2, "the operation did not wait for its stream");
}

// Operations of two streams and two groups take place in program order, though rank 0's first
// stream is late: in stream order alone the ranks would meet in different operations.
void two_streams_two_groups(Communicator& comm, Device device) {
  Stream first(device, "first"), second(device, "second");
  const auto copy_of_world = comm.split(0, comm.rank());
  Values<double> a(std::vector<double>(64, comm.rank()), device),
      b(std::vector<double>(64, 10.0 * comm.rank()), device);
  constexpr std::size_t kLate = std::size_t{8} << 20;
  Values<double> from(std::vector<double>(comm.rank() == 0 ? kLate : 1), device), to = from;
  if (device == kCpu && comm.rank() == 0)
    first.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  for (int i = 0; i < 20 && device != kCpu && comm.rank() == 0; ++i)
    copy_tensor(to.view(), from.view(), first);
  comm.all_reduce(a.view(), ReduceOp::sum, first);
  copy_of_world->all_reduce(b.view(), ReduceOp::sum, second);
  Event done(device);
  second.record(done);
  first.wait(done);
  comm.all_reduce(b.view(), ReduceOp::max, first);
  first.synchronize();
  second.synchronize();
  const double sum = comm.size() * (comm.size() - 1) / 2.0;
  expect(a.get()[63] == sum && b.get()[63] == 10 * sum, "two streams");
}

void immediate_and_dry_streams(Communicator& comm, Device device) {
  Stream immediate(device, "immediate", Stream::Mode::immediate);
  Stream dry(device, "dry", Stream::Mode::dry);
  Values<std::int32_t> v({1}, device), untouched({1}, device);
  comm.all_reduce(v.view(), ReduceOp::sum, immediate);
  comm.all_reduce(untouched.view(), ReduceOp::sum, dry);
  immediate.synchronize();
  expect(v.get()[0] == comm.size() && untouched.get()[0] == 1, "immediate or dry stream");
}

// A stream that has failed drops its later tasks; its operations must not block the thread for
// ever.
void a_failed_stream_does_not_block(Communicator& comm, Device) {
  Stream stream(kCpu, "test");
  std::vector<std::int32_t> v{1};
  stream.enqueue([] { throw std::runtime_error("planned"); });
  comm.all_reduce(view_of(v), ReduceOp::sum, stream);
  std::string message;
  try {
    stream.synchronize();
  } catch (const std::runtime_error& e) {
    message = e.what();
  }
  expect(message == "planned", "the stream's own failure must come out");
  comm.barrier();
  expect(v[0] == 1, "the operation must not have run");
}

void split_into_groups(Communicator& comm, Device) {
  // Even and odd ranks, order reversed.
  const auto part = comm.split(comm.rank() % 2, -comm.rank());
  const int members = (comm.size() + 1 - comm.rank() % 2) / 2;
  expect(part->size() == members, "size of the part");
  expect(part->rank() == members - 1 - comm.rank() / 2, "rank in the part");
  const auto sum = part->all_reduce_host(std::int64_t{comm.rank()}, ReduceOp::sum);
  expect(sum == (comm.rank() % 2 == 0 ? members * (members - 1) : members * members),
         "sum in the part");
  const auto none = comm.split(comm.rank() == 0 ? 3 : -1, 0);
  expect((none != nullptr) == (comm.rank() == 0), "a negative color joins nothing");
}

void host_helpers(Communicator& comm, Device) {
  expect(comm.all_reduce_host(comm.rank() + 0.5, ReduceOp::sum) ==
             comm.size() * (comm.size() - 1) / 2 + comm.size() * 0.5,
         "sum");
  expect(comm.all_reduce_host(std::int64_t{1} << (40 + comm.rank()), ReduceOp::max) ==
             std::int64_t{1} << (40 + comm.size() - 1),
         "max");
  std::string text = comm.rank() == comm.size() - 1 ? "from the last rank" : "?";
  comm.broadcast_host(text, comm.size() - 1);
  expect(text == "from the last rank", "broadcast_host");
  const auto all = comm.all_gather_host(std::string(static_cast<std::size_t>(comm.rank()), 'x'));
  for (int r = 0; r < comm.size(); ++r) {
    expect(all[static_cast<std::size_t>(r)] == std::string(static_cast<std::size_t>(r), 'x'),
           "all_gather_host");
  }
}

template <class F>
void expect_internal_error(F&& f, const char* what) {
  try {
    f();
  } catch (const InternalError&) {
    return;
  }
  throw std::runtime_error(std::string("accepted: ") + what);
}

void wrong_arguments(Communicator& comm, Device device) {
  Stream stream(device, "test");
  Values<float> v(std::vector<float>(8), device);
  Values<std::uint8_t> bytes(std::vector<std::uint8_t>(8), device);
  expect_internal_error([&] { comm.all_reduce(bytes.view(), ReduceOp::sum, stream); }, "sum of u8");
  expect_internal_error([&] { comm.broadcast(v.view(), comm.size(), stream); },
                        "root outside the group");
  expect_internal_error([&] { comm.send(v.view(), comm.rank(), stream); }, "message to oneself");
  Values<float> wrong(std::vector<float>(static_cast<std::size_t>(comm.size()) * 8 + 1), device);
  expect_internal_error([&] { comm.all_gather(wrong.view(), v.view(), stream); },
                        "all_gather size");
  expect_internal_error([&] { comm.reduce_scatter(v.view(), wrong.view(), ReduceOp::sum, stream); },
                        "reduce_scatter size");
  std::vector<std::int64_t> bounds(static_cast<std::size_t>(comm.size()) + 1, 0);
  expect_internal_error([&] { comm.gather_from_owners(v.view(), bounds, stream); },
                        "bounds that do not cover the tensor");
  bounds.back() = 8;
  expect_internal_error([&] { comm.reduce_to_owners(bytes.view(), bounds, ReduceOp::sum, stream); },
                        "parts of u8");
  bounds.push_back(8);
  expect_internal_error([&] { comm.reduce_to_owners(v.view(), bounds, ReduceOp::sum, stream); },
                        "too many bounds");
  auto plan = uneven_plan(comm.rank(), comm.size(), 4);
  expect_internal_error([&] { comm.all_to_all(v.view(), v.view().rows(0, 0), plan, stream); },
                        "rows outside the input");
  plan.send_rows.push_back(0);
  expect_internal_error([&] { comm.all_to_all(wrong.view(), wrong.view(), plan, stream); },
                        "plan of another group");
  const Device other = device == kCpu ? Device{Device::Kind::cuda, 0} : kCpu;
  const TensorView elsewhere(v.view().data(), DType::f32, {8}, other);
  expect_internal_error([&] { comm.all_reduce(elsewhere, ReduceOp::sum, stream); },
                        "memory of another device");
}

constexpr ConformanceCase kCases[] = {
    {"all_reduce is ordered", all_reduce_is_ordered},
    {"all_reduce larger than staging", all_reduce_larger_than_staging},
    {"reduction does not depend on buckets", reduction_does_not_depend_on_buckets},
    {"NaN and negative zero", nan_and_negative_zero},
    {"reduce_scatter and all_gather", reduce_scatter_and_all_gather},
    {"reduce_to_owners and gather_from_owners", reduce_to_owners_and_gather},
    {"all_to_all and back", all_to_all_and_back},
    {"broadcast from every rank", broadcast_from_every_rank},
    {"messages", messages},
    {"operations follow their stream", operations_follow_their_stream, true},
    {"operations follow copies", operations_follow_copies},
    {"two streams, two groups", two_streams_two_groups},
    {"immediate and dry streams", immediate_and_dry_streams},
    {"a failed stream does not block", a_failed_stream_does_not_block, true},
    {"split into groups", split_into_groups},
    {"host helpers", host_helpers},
    {"wrong arguments", wrong_arguments},
};

}  // namespace

std::span<const ConformanceCase> conformance_cases() {
  static const std::vector<ConformanceCase> all = [] {
    std::vector<ConformanceCase> cases(std::begin(kCases), std::end(kCases));
    for (const auto more : {move_cases(), group_cases()})
      cases.insert(cases.end(), more.begin(), more.end());
    return cases;
  }();
  return all;
}

}  // namespace moesaic::test
