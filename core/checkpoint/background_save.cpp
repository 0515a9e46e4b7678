#include "core/checkpoint/background_save.h"

#include <chrono>
#include <utility>

#include "core/base/activity.h"

namespace moesaic {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kAlignment = 64;
constexpr const char* kOffloaded = "offloaded";  // in names of files

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<StateTensor> with_access(std::span<const StateTensor> tensors) {
  std::vector<StateTensor> some;
  for (const StateTensor& t : tensors)
    if (t.access != nullptr) some.push_back(t);
  return some;
}

// Tells the bytes of all parts at once; what is left to tell is what was done.
ByteProgress begun(const ByteProgress& progress, std::span<const StateTensor> tensors) {
  std::uint64_t bytes = 0;
  for (const StateTensor& t : tensors)
    bytes += t.bytes();
  progress.begin(bytes);
  return {.total = {}, .more = progress.more};
}

}  // namespace

std::size_t StateSnapshot::bytes_for(std::span<const StateTensor> tensors) {
  std::size_t bytes = 0;
  for (const auto& t : tensors) {
    if (t.access == nullptr)
      bytes += aligned(t.view.bytes()) + aligned(t.remainder.empty() ? 0 : t.remainder.bytes());
  }
  return bytes;
}

void StateSnapshot::take(std::span<const StateTensor> tensors, Stream& stream) {
  const std::size_t bytes = bytes_for(tensors);
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
    if (t.access != nullptr) continue;
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
  take_snapshot(tensors, stream);
  const std::vector<StateTensor> accessed = with_access(tensors);
  if (accessed.empty()) {
    return start_thread(
        request.step,
        0,
        [r = std::move(request)](std::span<const StateTensor> copies, Stream& host) {
          save_checkpoint(r.checkpoints,
                          r.step,
                          copies,
                          r.values,
                          r.config_yaml,
                          r.keep_last,
                          r.keep_every,
                          host,
                          r.max_file_bytes,
                          r.progress);
          return std::string();
        });
  }
  const auto begin = Clock::now();
  std::filesystem::path folder;
  std::string first;
  try {
    folder = begin_checkpoint(request.checkpoints,
                              request.step,
                              checkpoint_part_bytes(tensors) + request.config_yaml.size());
    request.progress = begun(request.progress, tensors);
    first = write_checkpoint_part(
        folder, kOffloaded, accessed, stream, request.max_file_bytes, request.progress);
  } catch (...) {
    if (!folder.empty()) abandon_checkpoint(folder);
    return fail(request.step, std::current_exception());
  }
  start_thread(
      request.step,
      seconds_since(begin),
      [folder, first, r = std::move(request)](std::span<const StateTensor> copies, Stream& host) {
        std::vector<std::string> parts{first};
        try {
          parts.push_back(
              write_checkpoint_part(folder, "", copies, host, r.max_file_bytes, r.progress));
        } catch (...) {
          abandon_checkpoint(folder);
          throw;
        }
        commit_checkpoint(
            folder, r.step, r.values, r.config_yaml, parts, r.keep_last, r.keep_every);
        return std::string();
      });
}

void BackgroundSave::start_part(const std::filesystem::path& folder,
                                const std::string& writer,
                                const SaveRequest& request,
                                std::span<const StateTensor> tensors,
                                Stream& stream) {
  take_snapshot(tensors, stream);
  const auto begin = Clock::now();
  const std::vector<StateTensor> accessed = with_access(tensors);
  ByteProgress progress = request.progress;
  std::vector<std::string> parts;
  if (!accessed.empty()) {
    try {
      progress = begun(progress, tensors);
      parts.push_back(write_checkpoint_part(
          folder, writer + "-" + kOffloaded, accessed, stream, request.max_file_bytes, progress));
    } catch (...) {
      return fail(request.step, std::current_exception());
    }
  }
  start_thread(
      request.step,
      seconds_since(begin),
      [folder, writer, parts, progress, most = request.max_file_bytes](
          std::span<const StateTensor> copies, Stream& host) mutable {
        parts.push_back(write_checkpoint_part(folder, writer, copies, host, most, progress));
        return join_checkpoint_parts(parts);
      });
}

void BackgroundSave::take_snapshot(std::span<const StateTensor> tensors, Stream& stream) {
  MOESAIC_CHECK(!pending_.valid(), "the checkpoint before is still being written");
  snapshot_.take(tensors, stream);
}

// What went wrong before the writer's thread was started is a result like what goes wrong on it.
void BackgroundSave::fail(std::int64_t step, std::exception_ptr error) {
  std::promise<Result> result;
  result.set_value({step, 0, std::move(error), ""});
  pending_ = result.get_future();
}

void BackgroundSave::start_thread(std::int64_t step, double seconds_before, Write write) {
  pending_ = std::async(std::launch::async, [this, step, seconds_before, w = std::move(write)] {
    count_as_background();
    const auto begin = Clock::now();
    Result result;
    result.step = step;
    try {
      Stream host(kCpu, "checkpoint writer", Stream::Mode::immediate);
      result.part = w(snapshot_.tensors(), host);
    } catch (...) {
      result.error = std::current_exception();
    }
    result.seconds = seconds_before + seconds_since(begin);
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
