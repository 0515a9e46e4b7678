#pragma once
#include <string>

namespace moesaic::apps {

/// Version, git id, compiler, build and whether there is a CUDA backend, a line each: the text of `--version`.
std::string version_text();

}  // namespace moesaic::apps
