#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "core/checkpoint/background_save.h"

namespace moesaic::apps {

/// A checkpoint that all ranks write together, each the tensors that it speaks for. All ranks make the same calls in the
/// same order, and get the same answers.
class SharedSave {
 public:
  /// `host` must outlive this.
  explicit SharedSave(Communicator& host) : host_(host) {}

  struct Result {
    std::int64_t step = 0;
    double stall = 0,
           seconds = 0;  ///< that training waited; until the files were written, the slowest rank's
    std::string error;   ///< empty: the checkpoint is complete
    double bytes = 0;    ///< of the state, all ranks' parts
  };
  /// Starts to write. In the background: returns when the state has been copied, and look() or wait() has the result;
  /// else the result is there at once. The result of the one before must have been taken.
  void start(const SaveRequest& request,
             std::span<const StateTensor> own,
             Stream& stream,
             bool in_background);
  bool is_pending() const noexcept { return request_.has_value(); }
  /// The result, once all ranks have written their parts. One small exchange.
  std::optional<Result> look();
  /// Waits for it.
  Result wait();

 private:
  bool begin(std::uint64_t bytes);
  Result commit();
  /// The first rank's text that is not empty, with the rank; the same on all ranks.
  std::string first_failure(const std::string& own);

  Communicator& host_;
  BackgroundSave background_;
  std::optional<SaveRequest> request_;
  std::filesystem::path folder_;
  std::string failure_;                            // of begin(), on all ranks alike
  std::optional<BackgroundSave::Result> written_;  // of this rank, when not in the background
  double stall_ = 0, bytes_ = 0;
};

}  // namespace moesaic::apps
