#include "apps/shared_save.h"

#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::apps {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string what_of(const std::exception_ptr& error) {
  if (error == nullptr) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace

std::string SharedSave::first_failure(const std::string& own) {
  const auto all = host_.all_gather_host(own);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) return fmt::format("rank {}: {}", r, all[r]);
  }
  return "";
}

// The first rank makes the folder. False, and failure_ says why, when it could not.
bool SharedSave::begin(std::uint64_t bytes) {
  const std::int64_t all_bytes =
      host_.all_reduce_host(static_cast<std::int64_t>(bytes), ReduceOp::sum);
  std::string folder;
  failure_.clear();
  if (host_.rank() == 0) {
    try {
      folder =
          begin_checkpoint(request_->checkpoints,
                           request_->step,
                           static_cast<std::uint64_t>(all_bytes) + request_->config_yaml.size())
              .string();
    } catch (const Error& e) {
      failure_ = e.what();
    }
  }
  host_.broadcast_host(failure_, 0);
  host_.broadcast_host(folder, 0);
  folder_ = folder;
  return failure_.empty();
}

void SharedSave::start(const SaveRequest& request,
                       std::span<const StateTensor> own,
                       Stream& stream,
                       bool in_background) {
  MOESAIC_CHECK(!is_pending(), "the checkpoint before is still being written");
  const auto begin_time = std::chrono::steady_clock::now();
  request_ = request;
  written_.reset();
  std::int64_t state_bytes = 0;
  for (const StateTensor& t : own)
    state_bytes += static_cast<std::int64_t>(t.bytes());
  bytes_ = static_cast<double>(host_.all_reduce_host(state_bytes, ReduceOp::sum));
  if (begin(checkpoint_part_bytes(own))) {
    const std::string writer = fmt::format("rank{:05}", host_.rank());
    if (in_background) {
      background_.start_part(folder_, writer, request, own, stream);
    } else {
      BackgroundSave::Result result;
      try {
        result.part = write_checkpoint_part(
            folder_, writer, own, stream, request.max_file_bytes, request.progress);
      } catch (...) {
        result.error = std::current_exception();
      }
      result.seconds = seconds_since(begin_time);
      written_ = std::move(result);
    }
  }
  stall_ = seconds_since(begin_time);
}

std::optional<SharedSave::Result> SharedSave::look() {
  if (!is_pending()) return std::nullopt;
  const bool done = !failure_.empty() || written_.has_value() || background_.is_done();
  if (host_.all_reduce_host(std::int64_t{done ? 1 : 0}, ReduceOp::min) == 0) return std::nullopt;
  return commit();
}

SharedSave::Result SharedSave::wait() {
  MOESAIC_CHECK(is_pending(), "no checkpoint is being written");
  return commit();
}

SharedSave::Result SharedSave::commit() {
  const SaveRequest request = *std::exchange(request_, std::nullopt);
  Result result{request.step, stall_, stall_, failure_, bytes_};
  if (!failure_.empty()) return result;
  const BackgroundSave::Result own = written_ ? *written_ : background_.take_result();
  result.seconds = host_.all_reduce_host(own.seconds, ReduceOp::max);
  result.error = first_failure(what_of(own.error));
  const auto parts = host_.all_gather_host(own.part);
  if (host_.rank() == 0) {
    if (!result.error.empty()) {
      abandon_checkpoint(folder_);
    } else {
      try {
        commit_checkpoint(folder_,
                          request.step,
                          request.values,
                          request.config_yaml,
                          parts,
                          request.keep_last,
                          request.keep_every);
      } catch (const Error& e) {
        result.error = e.what();
      }
    }
  }
  host_.broadcast_host(result.error, 0);
  return result;
}

}  // namespace moesaic::apps
