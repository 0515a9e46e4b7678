#include "memory/tiers/file_tier.h"

#include "core/base/error.h"
#include "memory/tiers/file_engine.h"

namespace moesaic::tiers {

bool Transfer::is_done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Transfer::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (!state_->failure) return;
  if (state_->failure->is_input) throw InputError(state_->failure->text);
  throw ResourceError(state_->failure->text);
}

FileTier::FileTier(const RecordLayout& layout, Options options, OpenedQueue queue)
    : engine_(std::make_unique<Engine>(layout, std::move(options), std::move(queue))) {}
FileTier::~FileTier() = default;

Transfer FileTier::write(std::int64_t record, SectionRange range, const std::byte* image) {
  return engine_->start(true, record, range, const_cast<std::byte*>(image));  // only read from
}
Transfer FileTier::read(std::int64_t record, SectionRange range, std::byte* image) {
  return engine_->start(false, record, range, image);
}
const RecordLayout& FileTier::layout() const noexcept {
  return engine_->layout;
}
std::int64_t FileTier::records() const noexcept {
  return engine_->options.file.records;
}
bool FileTier::is_written(std::int64_t record, SectionRange range) const {
  return engine_->is_written(record, range);
}
std::uint64_t FileTier::file_bytes() const noexcept {
  return engine_->file_.bytes();
}
const std::filesystem::path& FileTier::path() const noexcept {
  return engine_->file_.path();
}
std::string_view FileTier::queue_name() const noexcept {
  return engine_->queue_->name();
}
std::vector<std::string> FileTier::notes() const {
  return engine_->notes();
}
FileTier::Counters FileTier::counters() const {
  return engine_->counters();
}

}  // namespace moesaic::tiers
