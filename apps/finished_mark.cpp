#include "apps/finished_mark.h"

#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

fs::path mark_of(const fs::path& run_dir) {
  return run_dir / "finished";
}

// A kill may leave the beginning of it, which must not pass for the whole.
std::string mark_text(std::int64_t step) {
  return fmt::format("step {}: all steps and the closing evaluation are done\n", step);
}

}  // namespace

void mark_finished(const fs::path& run_dir, std::int64_t step) {
  DurableFile file(mark_of(run_dir), DurableFile::Mode::replace);
  file.write(mark_text(step));
  file.finish();
}

bool is_marked_finished(const fs::path& run_dir, std::int64_t step) {
  std::ifstream file(mark_of(run_dir), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return text == mark_text(step);
}

void remove_finished_mark(const fs::path& run_dir) {
  std::error_code error;
  fs::remove(mark_of(run_dir), error);
  if (error)
    throw ResourceError(
        fmt::format("{}: cannot remove: {}", mark_of(run_dir).string(), error.message()));
}

}  // namespace moesaic::apps
