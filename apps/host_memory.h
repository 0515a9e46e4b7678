#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>

namespace moesaic::apps {

/// Bytes of host memory that this process and others like it can still get without swapping: MemAvailable, or less where a
/// control group (v2) of the process or one above it has a limit. Nothing where the system does not say. `root`: of /proc
/// and /sys (tests).
std::optional<std::uint64_t> available_host_memory(const std::filesystem::path& root = "/");

}  // namespace moesaic::apps
