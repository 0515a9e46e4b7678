#pragma once
// What the host-memory implementations share: argument checks, order, and reductions that combine
// in rank order. A transport only moves bytes.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/comm_queue.h"
#include "comm/communicator.h"
#include "memory/buffer.h"

namespace moesaic {

struct SendBlock {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};
struct RecvBlock {
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

/// Blocking operations of one rank on host bytes, called by its communication thread only.
class HostTransport {
 public:
  virtual ~HostTransport() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const char* name() const noexcept = 0;
  /// Rank `member` of this group, counted in the world.
  virtual int world_rank(int member) const = 0;
  /// Null for a negative color.
  virtual std::unique_ptr<HostTransport> split(int color, int key) = 0;
  /// sends[p] goes to rank p and lands in its receives[rank()]; lengths agree.
  virtual void all_to_all(std::span<const SendBlock> sends,
                          std::span<const RecvBlock> receives) = 0;
  virtual void broadcast(std::byte* data, std::int64_t bytes, int root) = 0;
  struct Send {
    SendBlock block;
    int peer = 0;
  };
  struct Receive {
    RecvBlock block;
    int peer = 0;
  };
  virtual void exchange(std::span<const Send> sends, std::span<const Receive> receives) = 0;
  virtual void barrier() = 0;
  /// The library's own all-reduce of `count` elements; false when it has none for this dtype.
  virtual bool library_all_reduce(std::byte* data,
                                  std::int64_t count,
                                  DType dtype,
                                  ReduceOp op) = 0;
};

/// out[i] = in[0][i] op in[1][i] op …, left to right in the accumulation type. `out` may be one of
/// the inputs. `in` holds the addresses of the ranks' elements.
void combine_in_order(std::byte* out,
                      std::span<const std::byte* const> in,
                      std::int64_t count,
                      DType dtype,
                      ReduceOp op);

/// A Communicator on a transport and the rank's communication thread.
class HostCommunicator : public Communicator {
 public:
  HostCommunicator(std::shared_ptr<CommQueue> queue,
                   std::unique_ptr<HostTransport> transport,
                   const CommOptions& options);
  ~HostCommunicator() override;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  const char* name() const noexcept override { return name_; }
  std::unique_ptr<Communicator> split(int color, int key) override;
  void all_reduce(TensorView inout, ReduceOp op, Stream& stream) override;
  void reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& stream) override;
  void all_gather(TensorView out, ConstTensorView in, Stream& stream) override;
  void reduce_to_owners(TensorView inout,
                        std::span<const std::int64_t> bounds,
                        ReduceOp op,
                        Stream& stream) override;
  void gather_from_owners(TensorView inout,
                          std::span<const std::int64_t> bounds,
                          Stream& stream) override;
  void all_to_all(TensorView out,
                  ConstTensorView in,
                  const AllToAllPlan& plan,
                  Stream& stream) override;
  void broadcast(TensorView inout, int root, Stream& stream) override;
  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override;
  void barrier() override;
  double all_reduce_host(double value, ReduceOp op) override;
  std::int64_t all_reduce_host(std::int64_t value, ReduceOp op) override;
  void broadcast_host(std::string& bytes, int root) override;
  std::vector<std::string> all_gather_host(const std::string& bytes) override;

 protected:
  /// The same kind of communicator for a part of the ranks.
  virtual std::unique_ptr<HostCommunicator> make(std::unique_ptr<HostTransport> transport) = 0;
  CommQueue& queue() noexcept { return *queue_; }
  const std::shared_ptr<CommQueue>& shared_queue() const noexcept { return queue_; }
  const CommOptions& options() const noexcept { return options_; }

 private:
  struct Staging;
  // For the watchdog.
  Exchange describe(const char* operation, std::int64_t bytes);
  std::shared_ptr<CommQueue> queue_;
  // Shared with the operations in flight, which may outlive the communicator.
  std::shared_ptr<HostTransport> transport_;
  std::shared_ptr<Staging> staging_;
  CommOptions options_;
  int rank_ = 0;
  int size_ = 1;
  const char* name_ = "";
  std::string group_ =
      "world";  // the same on all members: "world/2:1" = color 1 of the second split of world
  int splits_ = 0;
  std::uint64_t operations_ = 0;
};

}  // namespace moesaic
