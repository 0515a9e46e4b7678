#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "core/base/activity.h"
#include "core/base/tensor.h"

namespace moesaic::cuda {

/// Follows the exchanges of a rank from a thread of its own: asks the event behind each whether the device has come to it
/// (a sign of life for the watchdog, which itself calls nothing of CUDA), notes the oldest one that is not done, and asks
/// NCCL for errors that it found in the background: a network that failed, a peer that went away.
class ExchangeWatch {
 public:
  /// `fail`: called once, from that thread, with what NCCL found; does not return. `activity` may be null.
  ExchangeWatch(Device device, Activity* activity, std::function<void(const std::string&)> fail);
  ~ExchangeWatch();
  ExchangeWatch(const ExchangeWatch&) = delete;
  ExchangeWatch& operator=(const ExchangeWatch&) = delete;

  void add(ncclComm_t comm);
  void remove(ncclComm_t comm);  ///< before it is destroyed
  /// By the main thread, after it has enqueued `what` on `stream`.
  void enqueued(const Exchange& what, cudaStream_t stream);

 private:
  struct Pending {
    Exchange what;
    cudaEvent_t end = nullptr;
  };
  void work();
  bool look_at_events(std::unique_lock<std::mutex>& lock);
  std::string look_at_errors();

  Device device_;
  Activity* activity_;
  std::function<void(const std::string&)> fail_;
  std::uint64_t issued_ = 0;  // main thread
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ncclComm_t> comms_;
  std::deque<Pending> pending_;      // in the order of the device
  std::vector<cudaEvent_t> unused_;  // events
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace moesaic::cuda
