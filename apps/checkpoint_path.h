#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

namespace moesaic::apps {

/// The checkpoint that a user means by PATH[@STEP]: PATH is the folder of a run, its folder `checkpoints` (the newest
/// there, or that of STEP), or a checkpoint itself. Throws InputError saying what is there instead.
std::filesystem::path find_checkpoint(const std::string& text);
/// The same with the step given apart (--step); 0: as `text` says. Throws UsageError when it names another.
std::filesystem::path find_checkpoint(const std::string& text, std::int64_t step);

/// The folder of checkpoints of a run: RUN_DIR/checkpoints, or `path` itself when it has none.
std::filesystem::path checkpoints_in(const std::filesystem::path& path);

}  // namespace moesaic::apps
