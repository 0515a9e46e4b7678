#pragma once
#include <cstdint>
#include <filesystem>

// RUN_DIR/finished says that a run came to its end, closing evaluation and all, so that starting it again (the next element
// of a job array, a requeue) costs nothing. Only for the run that holds the folder's lock.
namespace moesaic::apps {

/// Writes the mark of a run that ended after `step`. Throws ResourceError.
void mark_finished(const std::filesystem::path& run_dir, std::int64_t step);
/// Whether the mark is there and whole, and of this step.
bool is_marked_finished(const std::filesystem::path& run_dir, std::int64_t step);
/// Before a run goes on: it has not come to its end any more. Throws ResourceError.
void remove_finished_mark(const std::filesystem::path& run_dir);

}  // namespace moesaic::apps
