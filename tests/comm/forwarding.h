#pragma once
#include <exception>
#include <memory>

#include "comm/communicator.h"

namespace moesaic::test {

/// Passes everything on to `inner`; tests override what they disturb.
class Forwarding : public Communicator {
 public:
  explicit Forwarding(Communicator& inner) : inner_(inner) {}

  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  const char* name() const noexcept override { return inner_.name(); }
  std::unique_ptr<Communicator> split(int color, int key) override {
    return inner_.split(color, key);
  }
  void all_reduce(TensorView inout, ReduceOp op, Stream& stream) override {
    inner_.all_reduce(inout, op, stream);
  }
  void reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& stream) override {
    inner_.reduce_scatter(out, in, op, stream);
  }
  void all_gather(TensorView out, ConstTensorView in, Stream& stream) override {
    inner_.all_gather(out, in, stream);
  }
  void reduce_to_owners(TensorView inout,
                        std::span<const std::int64_t> bounds,
                        ReduceOp op,
                        Stream& stream) override {
    inner_.reduce_to_owners(inout, bounds, op, stream);
  }
  void gather_from_owners(TensorView inout,
                          std::span<const std::int64_t> bounds,
                          Stream& stream) override {
    inner_.gather_from_owners(inout, bounds, stream);
  }
  void all_to_all(TensorView out,
                  ConstTensorView in,
                  const AllToAllPlan& plan,
                  Stream& stream) override {
    inner_.all_to_all(out, in, plan, stream);
  }
  void broadcast(TensorView inout, int root, Stream& stream) override {
    inner_.broadcast(inout, root, stream);
  }
  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override {
    inner_.exchange(sends, receives, stream);
  }
  void barrier() override { inner_.barrier(); }
  double all_reduce_host(double value, ReduceOp op) override {
    return inner_.all_reduce_host(value, op);
  }
  std::int64_t all_reduce_host(std::int64_t value, ReduceOp op) override {
    return inner_.all_reduce_host(value, op);
  }
  void broadcast_host(std::string& bytes, int root) override { inner_.broadcast_host(bytes, root); }
  std::vector<std::string> all_gather_host(const std::string& bytes) override {
    return inner_.all_gather_host(bytes);
  }
  [[noreturn]] void abort(int code, const std::string& why) override {
    inner_.abort(code, why);
    std::terminate();  // not reached
  }

 protected:
  Communicator& inner_;
};

}  // namespace moesaic::test
