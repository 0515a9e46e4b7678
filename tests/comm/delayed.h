#pragma once
#include <memory>

#include "tests/comm/forwarding.h"

namespace moesaic::test {

/// Passes everything on to `inner`, after a pause drawn from `seed`, the rank and a count: of the caller, and, on CPU
/// streams, of the stream. So the ranks meet in every order.
class Delayed final : public Forwarding {
 public:
  Delayed(Communicator& inner, std::uint64_t seed) : Forwarding(inner), seed_(seed) {}
  Delayed(std::unique_ptr<Communicator> inner, std::uint64_t seed)
      : Forwarding(*inner), owned_(std::move(inner)), seed_(seed) {}

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

 private:
  double draw();
  void pause();
  void pause(Stream& stream);

  std::unique_ptr<Communicator> owned_;
  std::uint64_t seed_, count_ = 0;
};

}  // namespace moesaic::test
