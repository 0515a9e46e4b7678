#pragma once
#include <utility>

namespace moesaic {

/// Logs a failed release of a handle; never throws.
void log_teardown_failure(int status) noexcept;

/// Unique owner of a C handle (stream, event, communicator…). Creation throws elsewhere; destruction logs.
/// `Destroy` returns 0 on success.
template <class Handle, auto Destroy>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle h) noexcept : h_(h) {}
  Owned(Owned&& other) noexcept : h_(std::exchange(other.h_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      reset();
      h_ = std::exchange(other.h_, Handle{});
    }
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { reset(); }

  Handle get() const noexcept { return h_; }
  explicit operator bool() const noexcept { return h_ != Handle{}; }
  void reset() noexcept {
    if (h_ == Handle{}) return;
    if (const auto status = Destroy(std::exchange(h_, Handle{})); static_cast<int>(status) != 0) {
      log_teardown_failure(static_cast<int>(status));
    }
  }

 private:
  Handle h_{};
};

}  // namespace moesaic
