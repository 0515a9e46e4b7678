#include "core/checkpoint/background_save.h"

#include <chrono>
#include <utility>

#include "core/base/activity.h"

namespace moesaic {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

void StateSnapshot::take(std::span<const StateTensor> tensors, Stream& stream) {
  std::size_t bytes = 0;
  for (const auto& t : tensors)
    bytes += aligned(t.view.bytes()) + aligned(t.remainder.empty() ? 0 : t.remainder.bytes());
  if (memory_.bytes() < bytes) {
    memory_ = {};  // never two copies
    memory_ = make_host_buffer(bytes, stream.device(), "checkpoint snapshot");
  }
  tensors_.clear();
  std::size_t at = 0;
  const auto copy = [&](const TensorView& from) {
    const TensorView to = memory_.view(from.shape(), from.dtype(), at);
    at += aligned(from.bytes());
    copy_tensor(to, from, stream);
    return to;
  };
  for (const auto& t : tensors) {
    const TensorView view = copy(t.view);
    tensors_.push_back(
        {t.name, view, t.remainder.empty() ? TensorView() : copy(t.remainder), t.place});
  }
  stream.synchronize();
}

BackgroundSave::~BackgroundSave() {
  if (pending_.valid()) pending_.wait();
}

void BackgroundSave::start(SaveRequest request,
                           std::span<const StateTensor> tensors,
                           Stream& stream) {
  const std::int64_t step = request.step;
  start_thread(
      step,
      [r = std::move(request)](std::span<const StateTensor> copies, Stream& writer) {
        save_checkpoint(r.checkpoints,
                        r.step,
                        copies,
                        r.values,
                        r.config_yaml,
                        r.keep_last,
                        r.keep_every,
                        writer,
                        r.max_file_bytes,
                        r.progress);
        return std::string();
      },
      tensors,
      stream);
}

void BackgroundSave::start_part(const std::filesystem::path& folder,
                                const std::string& writer,
                                const SaveRequest& request,
                                std::span<const StateTensor> tensors,
                                Stream& stream) {
  start_thread(
      request.step,
      [folder, writer, r = request](std::span<const StateTensor> copies, Stream& host) {
        return write_checkpoint_part(folder, writer, copies, host, r.max_file_bytes, r.progress);
      },
      tensors,
      stream);
}

void BackgroundSave::start_thread(std::int64_t step,
                                  Write write,
                                  std::span<const StateTensor> tensors,
                                  Stream& stream) {
  MOESAIC_CHECK(!pending_.valid(), "the checkpoint before is still being written");
  snapshot_.take(tensors, stream);
  pending_ = std::async(std::launch::async, [this, step, write = std::move(write)] {
    count_as_background();
    const auto begin = std::chrono::steady_clock::now();
    Result result;
    result.step = step;
    try {
      Stream host(kCpu, "checkpoint writer", Stream::Mode::immediate);
      result.part = write(snapshot_.tensors(), host);
    } catch (...) {
      result.error = std::current_exception();
    }
    result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
  });
}

bool BackgroundSave::is_done() const {
  return pending_.valid() &&
         pending_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

BackgroundSave::Result BackgroundSave::take_result() {
  MOESAIC_CHECK(pending_.valid(), "no checkpoint is being written");
  return pending_.get();
}

}  // namespace moesaic
