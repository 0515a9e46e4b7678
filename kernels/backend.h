#pragma once
#include <memory>
#include <string>

#include "kernels/ops/op.h"

namespace moesaic {

/// Owns what a Backend points to: one stream, its scratch arena, and for the CPU a thread pool, for CUDA the library
/// handles. Several may exist per device (one per stream).
class BackendOwner {
 public:
  struct Options {
    Device device = kCpu;
    Stream::Mode mode = Stream::Mode::worker;
    int num_threads = 1;            ///< CPU only
    std::size_t scratch_bytes = 0;  ///< 0 = a measuring arena (dry runs)
    std::string name = "main";
    KernelPath path = KernelPath::automatic;  ///< CUDA only
    Stream::Priority priority = Stream::Priority::normal;
  };
  explicit BackendOwner(const Options& options);
  ~BackendOwner();
  BackendOwner(const BackendOwner&) = delete;
  BackendOwner& operator=(const BackendOwner&) = delete;

  Backend& backend() noexcept { return *backend_; }
  Stream& stream() noexcept;
  Arena& scratch() noexcept;
  /// Shows every later op to `observer` until it is called with null. Waits for the stream.
  void observe(OpObserver* observer);
  /// Tells `observer` of every later choice between kernels, until it is called with null. CUDA only: the CPU has one
  /// kernel per op and tells nothing.
  void observe_paths(PathObserver* observer);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::unique_ptr<Backend> backend_;
};

}  // namespace moesaic
