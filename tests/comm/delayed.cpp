#include "tests/comm/delayed.h"

#include <chrono>
#include <thread>

#include "core/base/random.h"

namespace moesaic::test {
namespace {

// Mostly none, so that a suite stays short; now and then long enough for the others to get far ahead.
void sleep_for(double u) {
  if (u < 0.7) return;
  const double ms = u < 0.97 ? (u - 0.7) * 2 : 5;
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

}  // namespace

double Delayed::draw() {
  return uniform(seed_ + static_cast<std::uint64_t>(inner_.rank()) * 1009, count_++);
}

void Delayed::pause() {
  sleep_for(draw());
}

void Delayed::pause(Stream& stream) {
  pause();
  const double u = draw();
  if (stream.native() == nullptr && stream.mode() != Stream::Mode::dry)
    stream.enqueue([u] { sleep_for(u); });
}

std::unique_ptr<Communicator> Delayed::split(int color, int key) {
  pause();
  auto part = inner_.split(color, key);
  return part ? std::make_unique<Delayed>(std::move(part), seed_ + 77) : nullptr;
}

void Delayed::all_reduce(TensorView inout, ReduceOp op, Stream& stream) {
  pause(stream);
  inner_.all_reduce(inout, op, stream);
}
void Delayed::reduce_scatter(TensorView out, ConstTensorView in, ReduceOp op, Stream& stream) {
  pause(stream);
  inner_.reduce_scatter(out, in, op, stream);
}
void Delayed::all_gather(TensorView out, ConstTensorView in, Stream& stream) {
  pause(stream);
  inner_.all_gather(out, in, stream);
}
void Delayed::reduce_to_owners(TensorView inout,
                               std::span<const std::int64_t> bounds,
                               ReduceOp op,
                               Stream& stream) {
  pause(stream);
  inner_.reduce_to_owners(inout, bounds, op, stream);
}
void Delayed::gather_from_owners(TensorView inout,
                                 std::span<const std::int64_t> bounds,
                                 Stream& stream) {
  pause(stream);
  inner_.gather_from_owners(inout, bounds, stream);
}
void Delayed::all_to_all(TensorView out,
                         ConstTensorView in,
                         const AllToAllPlan& plan,
                         Stream& stream) {
  pause(stream);
  inner_.all_to_all(out, in, plan, stream);
}
void Delayed::broadcast(TensorView inout, int root, Stream& stream) {
  pause(stream);
  inner_.broadcast(inout, root, stream);
}
void Delayed::exchange(std::span<const OutgoingMessage> sends,
                       std::span<const IncomingMessage> receives,
                       Stream& stream) {
  pause(stream);
  inner_.exchange(sends, receives, stream);
}
void Delayed::barrier() {
  pause();
  inner_.barrier();
}
double Delayed::all_reduce_host(double value, ReduceOp op) {
  pause();
  return inner_.all_reduce_host(value, op);
}
std::int64_t Delayed::all_reduce_host(std::int64_t value, ReduceOp op) {
  pause();
  return inner_.all_reduce_host(value, op);
}
void Delayed::broadcast_host(std::string& bytes, int root) {
  pause();
  inner_.broadcast_host(bytes, root);
}
std::vector<std::string> Delayed::all_gather_host(const std::string& bytes) {
  pause();
  return inner_.all_gather_host(bytes);
}

}  // namespace moesaic::test
