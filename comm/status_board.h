#pragma once
#include <filesystem>
#include <optional>

#include "comm/rank_status.h"

namespace moesaic {

/// A folder that all ranks see, in which each keeps a small file with its status: how the watchdogs of a job tell each
/// other where they are, without MPI. Calls may block as long as the file system does.
class StatusBoard {
 public:
  explicit StatusBoard(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Replaces the status of its rank in one instant. False when the file could not be written.
  bool write(const RankStatus& status) const noexcept;
  std::optional<RankStatus> read(int rank) const noexcept;
  void remove(int rank) const noexcept;  ///< and the folder, if it is empty then
  const std::filesystem::path& folder() const noexcept { return folder_; }

 private:
  std::filesystem::path file_of(int rank) const;
  std::filesystem::path folder_;
};

}  // namespace moesaic
