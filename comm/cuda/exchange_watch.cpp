#include "comm/cuda/exchange_watch.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "memory/cuda/check.h"

namespace moesaic::cuda {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(20);
// More exchanges in flight than anybody needs to see; beyond it they go unwatched.
constexpr std::size_t kMostPending = 4096;

}  // namespace

ExchangeWatch::ExchangeWatch(Device device,
                             Activity* activity,
                             std::function<void(const std::string&)> fail)
    : device_(device), activity_(activity), fail_(std::move(fail)), thread_([this] { work(); }) {}

ExchangeWatch::~ExchangeWatch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const Pending& p : pending_)
    MOESAIC_CUDA_TEARDOWN(cudaEventDestroy(p.end));
  for (cudaEvent_t event : unused_)
    MOESAIC_CUDA_TEARDOWN(cudaEventDestroy(event));
}

void ExchangeWatch::add(ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  comms_.push_back(comm);
}

void ExchangeWatch::remove(ncclComm_t comm) {
  const std::lock_guard lock(mutex_);
  comms_.erase(std::remove(comms_.begin(), comms_.end(), comm), comms_.end());
}

void ExchangeWatch::enqueued(const Exchange& what, cudaStream_t stream) {
  Pending pending{what};
  pending.what.number = ++issued_;
  pending.what.state = Exchange::State::moving;
  pending.what.since_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  if (activity_ != nullptr) {
    pending.what.step = activity_->period.latest().step;
    pending.what.place = activity_->issued.latest();
  }
  {
    const std::lock_guard lock(mutex_);
    if (pending_.size() >= kMostPending) return;
    if (!unused_.empty()) {
      pending.end = unused_.back();
      unused_.pop_back();
    }
  }
  if (pending.end == nullptr)
    MOESAIC_CUDA_CALL(cudaEventCreateWithFlags(&pending.end, cudaEventDisableTiming));
  MOESAIC_CUDA_CALL(cudaEventRecord(pending.end, stream));
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(pending);
  }
  changed_.notify_all();
}

void ExchangeWatch::work() {
  const cudaError_t chosen = cudaSetDevice(device_.ordinal);
  if (chosen != cudaSuccess) return;  // the main thread met the same before, and says so
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (pending_.empty()) {
      changed_.wait(lock, [&] { return closing_ || !pending_.empty(); });
      continue;
    }
    if (!look_at_events(lock)) {
      // What this thread was asked to end, it ends at once; else it looks again in a while.
      changed_.wait_for(lock, kInterval, [&] { return closing_; });
      if (closing_) return;
    }
    const std::string error = look_at_errors();
    if (error.empty()) continue;
    lock.unlock();
    fail_(error);
    return;
  }
}

// True when the device has come further. The lock is not held while CUDA, which may block, is asked.
bool ExchangeWatch::look_at_events(std::unique_lock<std::mutex>& lock) {
  const Pending oldest = pending_.front();
  lock.unlock();
  if (activity_ != nullptr) activity_->device_exchange.write(oldest.what);
  const cudaError_t found = cudaEventQuery(oldest.end);
  lock.lock();
  if (found == cudaErrorNotReady) return false;
  // Any other error stays with the device; the main thread meets it and says what it was doing.
  pending_.pop_front();
  unused_.push_back(oldest.end);
  if (found != cudaSuccess) return false;
  count_progress();
  if (activity_ != nullptr)
    activity_->device_exchange.update([](Exchange& e) { e.state = Exchange::State::done; });
  return true;
}

std::string ExchangeWatch::look_at_errors() {
  for (ncclComm_t comm : comms_) {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &found);
    if (asked != ncclSuccess || found == ncclSuccess || found == ncclInProgress) continue;
    const Exchange& what = pending_.empty() ? Exchange{} : pending_.front().what;
    return fmt::format("NCCL found an error between the GPUs: {}; {} (in {} #{} of group {})",
                       ncclGetErrorString(found),
                       ncclGetLastError(comm),
                       *what.operation == '\0' ? "no exchange" : what.operation,
                       what.number_in_group,
                       what.group.data());
  }
  return "";
}

}  // namespace moesaic::cuda
