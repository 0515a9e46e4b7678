#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <liburing.h>
#include <sys/resource.h>

#include "core/base/error.h"
#include "memory/tiers/io_queue.h"

namespace moesaic::tiers {
namespace {

// What to do about an error of io_uring_queue_init().
std::string setup_problem(int error) {
  const std::string text = fmt::format("the kernel gives no io_uring ({})", std::strerror(error));
  switch (error) {
    case ENOSYS:
      return text + "; it needs Linux 5.6 or newer, and a container that allows the system call";
    case EPERM:
    case EACCES:
      return text +
             "; look at sysctl kernel.io_uring_disabled and at the container's seccomp "
             "profile";
    case ENOMEM:
      return text + "; raise the limit of locked memory ('ulimit -l unlimited')";
    default:
      return text;
  }
}

std::string memlock_text() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "an unknown limit";
  if (limit.rlim_cur == RLIM_INFINITY) return "no limit";
  return fmt::format("a limit of {} KiB", limit.rlim_cur / 1024);
}

class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(int depth)
      : depth_(depth), error_(-io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0)) {}
  ~UringQueue() override {
    if (error_ == 0) io_uring_queue_exit(&ring_);
  }
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  int error() const noexcept { return error_; }  // 0, or why there is no ring

  // Empty, or why requests go without registered memory.
  std::string keep_mapped(const std::vector<Memory>& fixed) {
    std::vector<iovec> regions;
    std::uint64_t bytes = 0;
    for (const Memory& m : fixed) {
      for (std::size_t at = 0; at < m.size(); at += kMaxRegion) {
        regions.push_back({m.data() + at, std::min(kMaxRegion, m.size() - at)});
        bytes += regions.back().iov_len;
      }
    }
    if (regions.empty()) return "";
    const int status =
        io_uring_register_buffers(&ring_, regions.data(), static_cast<unsigned>(regions.size()));
    if (status == 0) {
      regions_ = std::move(regions);
      return "";
    }
    return fmt::format(
        "io_uring maps memory anew for every request: registering {} MiB failed ({}) under {} of "
        "locked memory; 'ulimit -l unlimited' (in a container --ulimit memlock=-1) avoids that",
        bytes >> 20,
        std::strerror(-status),
        memlock_text());
  }

  std::string_view name() const noexcept override { return "io_uring"; }
  int depth() const noexcept override { return depth_; }

  void submit(const IoRequest& r) override {
    MOESAIC_CHECK(in_flight_ < depth_, "more requests than the queue holds");
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    MOESAIC_CHECK(entry != nullptr, "the ring holds its depth");
    const int region = region_of(r);
    if (region >= 0 && r.is_write) {
      io_uring_prep_write_fixed(entry, r.fd, r.data, r.bytes, r.offset, region);
    } else if (region >= 0) {
      io_uring_prep_read_fixed(entry, r.fd, r.data, r.bytes, r.offset, region);
    } else if (r.is_write) {
      io_uring_prep_write(entry, r.fd, r.data, r.bytes, r.offset);
    } else {
      io_uring_prep_read(entry, r.fd, r.data, r.bytes, r.offset);
    }
    io_uring_sqe_set_data64(entry, r.tag);
    ++in_flight_;
    // EAGAIN and EBUSY: the kernel is short of something that completions give back; wait() submits again.
    const int status = io_uring_submit(&ring_);
    if (status < 0 && status != -EAGAIN && status != -EBUSY && status != -EINTR)
      throw InternalError(fmt::format("io_uring_submit failed: {}", std::strerror(-status)));
  }

  std::vector<IoCompletion> wait() override {
    MOESAIC_CHECK(in_flight_ > 0, "nothing to wait for");
    for (;;) {
      const int status = io_uring_submit_and_wait(&ring_, 1);
      if (status >= 0) break;
      if (status != -EINTR && status != -EAGAIN && status != -EBUSY)
        throw InternalError(
            fmt::format("io_uring_submit_and_wait failed: {}", std::strerror(-status)));
      if (io_uring_cq_ready(&ring_) > 0) break;
    }
    std::vector<IoCompletion> completions;
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) == 0) {
      completions.push_back({io_uring_cqe_get_data64(entry), entry->res});
      io_uring_cqe_seen(&ring_, entry);
    }
    in_flight_ -= static_cast<int>(completions.size());
    return completions;
  }

 private:
  static constexpr std::size_t kMaxRegion = std::size_t{1} << 30;  // the kernel's limit

  int region_of(const IoRequest& r) const {
    for (std::size_t i = 0; i < regions_.size(); ++i) {
      const auto* base = static_cast<const std::byte*>(regions_[i].iov_base);
      if (r.data >= base && r.data + r.bytes <= base + regions_[i].iov_len)
        return static_cast<int>(i);
    }
    return -1;
  }

  io_uring ring_{};
  int depth_;
  int error_;
  int in_flight_ = 0;
  std::vector<iovec> regions_;
};

}  // namespace

OpenedQueue try_uring_queue(int depth, const std::vector<Memory>& fixed) {
  auto queue = std::make_unique<UringQueue>(depth);
  if (queue->error() != 0) return {nullptr, {setup_problem(queue->error())}};
  OpenedQueue opened;
  if (std::string note = queue->keep_mapped(fixed); !note.empty())
    opened.notes.push_back(std::move(note));
  opened.queue = std::move(queue);
  return opened;
}

}  // namespace moesaic::tiers
