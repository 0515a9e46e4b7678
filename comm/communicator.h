#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "memory/stream.h"

namespace moesaic {

struct Activity;  // core/base/activity.h

/// max and min pass NaN on: one rank's NaN reaches every rank.
enum class ReduceOp : std::uint8_t { sum, max, min };

/// ordered: every element is combined in rank order, ((x_0 + x_1) + x_2) + …, in the accumulation
/// type, so its bits depend on the values and the ranks only. library: the order that the library's
/// own algorithm takes (f64, f32, i64, i32 only).
enum class Reduction : std::uint8_t { ordered, library };

struct CommOptions {
  Reduction reduction = Reduction::ordered;
  /// Longer messages are cut; also what keeps counts inside the `int` of MPI. 1 … 2^30.
  std::int64_t max_message_bytes = std::int64_t{1} << 30;
  /// Where a rank notes which exchange it is at, for its watchdog; must outlive the communicators. `mpi` only: ranks of one
  /// process cannot share one.
  Activity* activity = nullptr;
};

/// Who sends how many rows to whom. Plain host data; one entry per rank of the group.
/// Rows [send_offset[p], send_offset[p] + send_rows[p]) of the input go to rank p; what rank p
/// sends here lands in the output from row recv_offset[p] on. Send ranges may overlap, receive
/// ranges not.
struct AllToAllPlan {
  std::vector<std::int64_t> send_rows, send_offset;
  std::vector<std::int64_t> recv_rows, recv_offset;
  std::int64_t row_bytes = 0;

  /// The way back: what was received is sent to where it came from.
  AllToAllPlan reversed() const;
  /// Throws InternalError on a wrong length, a negative count, or rows outside `in_bytes` or
  /// `out_bytes`.
  void check(int group_size, std::size_t in_bytes, std::size_t out_bytes) const;
};

struct OutgoingMessage {
  ConstTensorView data;
  int peer = 0;
};
struct IncomingMessage {
  TensorView data;
  int peer = 0;
};

/// Throws InternalError unless `bounds` cuts `elements` elements into a part for each of `group_size` ranks.
void check_bounds(std::span<const std::int64_t> bounds, int group_size, std::int64_t elements);

/// A fixed set of ranks that call the same operations in the same order.
///
/// Calls with a Stream check their arguments, enqueue and return. The operation takes place when
/// the stream gets there; operations of all streams and groups of a rank take place in the order of
/// these calls. Buffers must stay valid until the stream has passed. On a dry stream nothing
/// happens. A failure inside an operation surfaces at stream.synchronize(). Wrong arguments:
/// InternalError. A rank that never arrives leaves the others waiting; that is the watchdog's task.
///
/// dtypes: reductions take f64, f32, bf16 (summed in f32, rounded once), i64 and i32; the others
/// move bytes and take any.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const char* name() const noexcept = 0;  ///< "local", "mpi", "nccl"

  /// Ranks with one `color` form a group, ordered by `key`, then by rank. All ranks must call; a
  /// negative color takes part without joining and returns null. Blocks the host.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  /// inout[i] = reduction over ranks of inout[i]; equal bits on all ranks. Ordered: slices by
  /// all-to-all, local combination in rank order, all-gather.
  virtual void all_reduce(TensorView inout, ReduceOp op, Stream& stream) = 0;
  /// out = slice rank() of the reduction of `in`; `in` has size() times the elements of `out`.
  /// `out` may be that very slice of `in`.
  virtual void reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& stream) = 0;
  /// out = the `in` of ranks 0, 1, …, one after the other; `in` may be slice rank() of `out`.
  virtual void all_gather(TensorView out, ConstTensorView in, Stream& stream) = 0;
  /// Rank p owns elements [bounds[p], bounds[p + 1]) of `inout`, from 0 to its end; empty parts are allowed. The own part
  /// becomes the reduction over ranks, with the bits of all_reduce(); what the other parts hold afterwards is undefined.
  virtual void reduce_to_owners(TensorView inout,
                                std::span<const std::int64_t> bounds,
                                ReduceOp op,
                                Stream& stream) = 0;
  /// The way back: every rank gets every part from its owner.
  virtual void gather_from_owners(TensorView inout,
                                  std::span<const std::int64_t> bounds,
                                  Stream& stream) = 0;
  /// Moves rows by `plan`. `out` and `in` must not overlap.
  virtual void all_to_all(TensorView out,
                          ConstTensorView in,
                          const AllToAllPlan& plan,
                          Stream& stream) = 0;
  virtual void broadcast(TensorView inout, int root, Stream& stream) = 0;
  /// All messages at once, so a ring of ranks that each send and receive in one call cannot lock up. Messages between two
  /// ranks arrive in order. With one peer, the second message out and the second one in may wait for the first two (NCCL moves
  /// them in pairs), and so on: calls that do not match the peer's one to one should hold one message each way.
  virtual void exchange(std::span<const OutgoingMessage> sends,
                        std::span<const IncomingMessage> receives,
                        Stream& stream) = 0;
  /// May wait for the matching recv.
  void send(ConstTensorView in, int peer, Stream& stream);
  void recv(TensorView out, int peer, Stream& stream);

  // Blocking helpers for small host values, in program order with everything above.
  virtual void barrier() = 0;
  virtual double all_reduce_host(double value, ReduceOp op) = 0;
  virtual std::int64_t all_reduce_host(std::int64_t value, ReduceOp op) = 0;
  /// `bytes` of `root` on all ranks; its length may differ before.
  virtual void broadcast_host(std::string& bytes, int root) = 0;
  /// Element r is the `bytes` of rank r; lengths may differ.
  virtual std::vector<std::string> all_gather_host(const std::string& bytes) = 0;

  /// Ends the job with exit status `code` on behalf of all ranks, from any thread, whatever they
  /// are doing. mpi: the process ends here and the launcher ends the others within seconds. local:
  /// every waiting rank gets an InternalError, and this throws Error(code).
  [[noreturn]] virtual void abort(int code, const std::string& why) = 0;
};

/// `size` ranks of one process, to be used from one thread each.
std::vector<std::unique_ptr<Communicator>> make_local_communicators(
    int size, const CommOptions& options = {});

/// Calls body(communicator) on `size` threads as ranks of one local group and joins them. When a
/// rank throws, the others are released by abort(), and the first exception is thrown here.
void run_local_ranks(int size,
                     const std::function<void(Communicator&)>& body,
                     const CommOptions& options = {});

}  // namespace moesaic
