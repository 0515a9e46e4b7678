#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/tensor.h"
#include "memory/offload/plan.h"
#include "memory/stream.h"

namespace moesaic::offload {

/// For tests: what must not change a bit.
struct Disturbance {
  bool poison = false;  ///< places hold NaNs when their tensor has left
  std::function<void(Stream&)>
      before;  ///< called before each copy, with its stream; may enqueue a delay
  bool any() const { return poison || before != nullptr; }
};

/// Carries out a plan: copies tensors out to host memory and back, on two streams of its own, beside the stream that uses
/// them. Everything is enqueued; the host never waits. Used by one thread.
class Offloader {
 public:
  /// Bytes (u8) on the device and in host memory (pinned, for a GPU), at least as many as the plan says. Nothing is
  /// allocated.
  struct Memory {
    TensorView device, host;
  };
  Offloader(Plan plan, const Memory& memory, Stream::Mode mode, Disturbance disturbance = {});
  ~Offloader();  ///< waits for its streams
  Offloader(const Offloader&) = delete;
  Offloader& operator=(const Offloader&) = delete;

  /// Where a tensor is whenever a visit uses it: bytes (u8), at least as many as were asked for.
  TensorView place_of(int tensor) const;
  const Plan& plan() const noexcept { return plan_; }

  /// A visit is about to be enqueued on `user`; the visits come in the order of the plan, round after round.
  void begin_visit(Stream& user);
  /// It has been.
  void end_visit(Stream& user);
  /// Waits for the copies and rethrows what went wrong in them.
  void synchronize();

 private:
  void load(int tensor);
  void store(int tensor, const Event& written);
  void give_back(int tensor, Stream& user);
  TensorView home_of(int tensor) const;
  const Plan::Tensor& tensor(int t) const { return plan_.tensors[static_cast<std::size_t>(t)]; }

  Plan plan_;
  Disturbance disturbance_;
  Memory memory_;
  std::vector<std::size_t> offsets_;  // of places
  Stream in_, out_;
  struct PlaceState {
    Event used, copied_out;  // the last of what others must wait for
  };
  std::vector<PlaceState> places_;
  std::vector<Event> loaded_;  // by tensor
  Event visited_, round_;
  std::size_t next_ = 0;
  bool is_inside_ = false;
};

}  // namespace moesaic::offload
