#include "memory/tiers/file_engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "core/base/activity.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"

namespace moesaic::tiers {
namespace {

// Requests that come back without a byte are sent again so often; the later half after a millisecond each.
constexpr int kMaxTries = 1000;

constexpr const char* kAdvice =
    "Nothing of the last checkpoint is lost; start again, with another memory.file_path if this "
    "disk "
    "stays so";

ScratchFile::Options within_budget(const RecordLayout& layout, const FileTier::Options& o) {
  const std::uint64_t needed = ScratchFile::bytes_for(layout, o.file.records);
  if (needed > o.budget_bytes) {
    throw ResourceError(
        fmt::format("the file tier of {} records of {} bytes needs {} bytes; memory.file_budget is "
                    "{}. Raise it, or keep more in the other tiers",
                    o.file.records,
                    layout.stride(),
                    needed,
                    o.budget_bytes));
  }
  return o.file;
}

}  // namespace

FileTier::Engine::Engine(const RecordLayout& l, Options o, OpenedQueue queue)
    : layout(l),
      options(std::move(o)),
      file_(within_budget(layout, options), layout),
      queue_(std::move(queue.queue)),
      notes_(std::move(queue.notes)) {
  MOESAIC_CHECK(queue_ != nullptr, "a file tier needs a queue");
  MOESAIC_CHECK(options.piece_bytes > 0 && options.piece_bytes % kBlockAlignment == 0,
                "pieces are multiples of the alignment");
  notes_.insert(notes_.end(), file_.notes().begin(), file_.notes().end());
  for (const std::string& note : notes_)
    spdlog::warn("file tier {}: {}", file_.path().string(), note);
  entries_.resize(static_cast<std::size_t>(options.file.records) *
                  static_cast<std::size_t>(layout.count()));
  slots_.resize(static_cast<std::size_t>(queue_->depth()));
  for (std::size_t i = slots_.size(); i > 0; --i)
    free_slots_.push_back(i - 1);
  thread_ = std::thread([this] { work(); });
}

FileTier::Engine::~Engine() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

FileTier::Engine::SectionEntry& FileTier::Engine::entry(std::int64_t record, int section) {
  return entries_[static_cast<std::size_t>(record * layout.count() + section)];
}
const FileTier::Engine::SectionEntry& FileTier::Engine::entry(std::int64_t record,
                                                              int section) const {
  return entries_[static_cast<std::size_t>(record * layout.count() + section)];
}

Transfer FileTier::Engine::start(bool is_write,
                                 std::int64_t record,
                                 SectionRange range,
                                 std::byte* image) {
  layout.check(range);
  MOESAIC_CHECK(record >= 0 && record < options.file.records,
                fmt::format("record {} of {}", record, options.file.records));
  MOESAIC_CHECK(reinterpret_cast<std::uintptr_t>(image) % kBlockAlignment == 0 && image != nullptr,
                "images of records are aligned");
  auto job = std::make_unique<Job>();
  job->state = std::make_shared<Transfer::State>();
  job->is_write = is_write;
  job->record = record;
  job->range = range;
  job->image = image + layout.offset(range);
  job->extent = layout.extent(range);
  Transfer transfer(job->state);
  {
    const std::lock_guard lock(mutex_);
    for (int s = range.first; s < range.end(); ++s) {
      const SectionEntry& e = entry(record, s);
      MOESAIC_CHECK(!e.writing && (!is_write || e.readers == 0),
                    place(*job, 0) + " is in a transfer already");
      MOESAIC_CHECK(is_write || e.written, place(*job, 0) + " was never written");
    }
    for (int s = range.first; s < range.end(); ++s) {
      SectionEntry& e = entry(record, s);
      if (is_write) {
        e.writing = true;
        e.written = false;
      } else {
        ++e.readers;
      }
    }
    arrived_.push_back(std::move(job));
  }
  changed_.notify_all();
  return transfer;
}

bool FileTier::Engine::is_written(std::int64_t record, SectionRange range) const {
  layout.check(range);
  const std::lock_guard lock(mutex_);
  for (int s = range.first; s < range.end(); ++s)
    if (!entry(record, s).written) return false;
  return true;
}

std::vector<std::string> FileTier::Engine::notes() const {
  const std::lock_guard lock(mutex_);
  return notes_;
}
FileTier::Counters FileTier::Engine::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

std::uint64_t FileTier::Engine::file_offset(const Job& job, std::uint64_t at) const {
  return file_.record_offset(job.record) + layout.offset(job.range) + at;
}

// "PATH: offset 8192: section W of layer 3, expert 17"
std::string FileTier::Engine::place(const Job& job, std::uint64_t at) const {
  return fmt::format(
      "{}: offset {}: section{} {} of {}",
      file_.path().string(),
      file_offset(job, at),
      job.range.count > 1 ? "s" : "",
      layout.text(job.range),
      options.name ? options.name(job.record) : fmt::format("record {}", job.record));
}

void FileTier::Engine::work() noexcept {
  try {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return closing_ || !arrived_.empty() || !active_.empty(); });
        if (arrived_.empty() && active_.empty()) return;
        while (!arrived_.empty()) {
          active_.push_back(std::move(arrived_.front()));
          arrived_.pop_front();
        }
      }
      fill();
      if (free_slots_.size() == slots_.size()) continue;
      for (const IoCompletion& c : queue_->wait())
        handle(c);
      count_progress();
    }
  } catch (const std::exception& e) {
    // The queue itself failed. Nobody can say what became of the requests in it, and they point into memory of others.
    spdlog::critical("file tier {}: {}", file_.path().string(), e.what());
    std::terminate();
  }
}

void FileTier::Engine::fill() {
  for (std::size_t i = 0; i < active_.size() && !free_slots_.empty(); ++i) {
    Job& job = *active_[i];
    if (job.is_write && job.sent == 0 && job.crcs.empty()) {
      for (int s = job.range.first; s < job.range.end(); ++s) {
        const Section& section = layout.section(s);
        job.crcs.push_back(
            crc32c(job.image + (section.offset - layout.offset(job.range)), section.bytes));
      }
    }
    while (job.sent < job.extent && !job.failure && !free_slots_.empty()) {
      const std::size_t slot = free_slots_.back();
      free_slots_.pop_back();
      const auto bytes = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(options.piece_bytes, job.extent - job.sent));
      slots_[slot] = {.job = &job, .at = job.sent, .bytes = bytes};
      job.sent += bytes;
      ++job.in_flight;
      submit(slot);
    }
  }
}

void FileTier::Engine::submit(std::size_t slot) {
  Piece& p = slots_[slot];
  p.was_direct = file_.is_direct();
  queue_->submit({.tag = slot,
                  .is_write = p.job->is_write,
                  .fd = file_.fd(),
                  .data = p.job->image + p.at,
                  .bytes = p.bytes,
                  .offset = file_offset(*p.job, p.at)});
}

void FileTier::Engine::again(std::size_t slot) {
  {
    const std::lock_guard lock(mutex_);
    ++counters_.retries;
  }
  if (++slots_[slot].tries > kMaxTries / 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  submit(slot);
}

void FileTier::Engine::handle(const IoCompletion& completion) {
  const auto slot = static_cast<std::size_t>(completion.tag);
  Piece& p = slots_.at(slot);
  if (completion.result < 0) {
    const int error = static_cast<int>(-completion.result);
    const bool passing = error == EINTR || error == EAGAIN;
    if (passing && p.tries < kMaxTries) return again(slot);
    if (error == EINVAL && p.was_direct) {
      if (file_.is_direct()) {
        file_.give_up_direct("refused at the first transfer");
        spdlog::warn("file tier {}: {}", file_.path().string(), file_.notes().back());
        const std::lock_guard lock(mutex_);
        notes_.push_back(file_.notes().back());
      }
      return again(slot);
    }
    fail(p, error);
  } else if (completion.result == 0 || completion.result > p.bytes) {
    // The end of the file, which nobody but this process may move; a write without effect is a full disk.
    fail(p, p.job->is_write ? ENOSPC : 0);
  } else {
    past_page_cache(p);
    const auto moved = static_cast<std::uint32_t>(completion.result);
    if (moved < p.bytes) {
      // Direct requests begin at multiples of the alignment.
      const auto whole = moved / static_cast<std::uint32_t>(kBlockAlignment) *
                         static_cast<std::uint32_t>(kBlockAlignment);
      if (whole > 0) p.tries = 0;
      p.at += whole;
      p.bytes -= whole;
      if (p.tries < kMaxTries) return again(slot);
      fail(p, EIO);
    }
  }
  put_away(slot);
}

void FileTier::Engine::fail(Piece& p, int error) {
  if (p.job->failure) return;  // the first error is the one to report
  const std::string where = place(*p.job, p.at);
  std::string text;
  if (error == 0) {
    text = fmt::format("{}: the file ends there: somebody cut it while it was in use", where);
  } else if (error == ENOSPC || error == EDQUOT) {
    text = fmt::format(
        "{}: no space for {} bytes ({}); {} bytes are free there. Free space, lower "
        "memory.file_budget, or name another memory.file_path",
        where,
        p.bytes,
        std::strerror(error),
        free_bytes(file_.path()));
  } else {
    text = fmt::format("{}: {} {} bytes failed: {}",
                       where,
                       p.job->is_write ? "writing" : "reading",
                       p.bytes,
                       std::strerror(error));
  }
  p.job->failure = Failure{error == 0, fmt::format("{}. {}", text, kAdvice)};
}

void FileTier::Engine::put_away(std::size_t slot) {
  Job& job = *slots_[slot].job;
  slots_[slot] = {};
  free_slots_.push_back(slot);
  if (--job.in_flight > 0 || (job.sent < job.extent && !job.failure)) return;
  close(job);
  std::erase_if(active_, [&](const auto& j) { return j.get() == &job; });
}

std::optional<Failure> FileTier::Engine::verify(const Job& job) const {
  for (int s = job.range.first; s < job.range.end(); ++s) {
    const Section& section = layout.section(s);
    const std::uint64_t at = section.offset - layout.offset(job.range);
    const std::uint32_t found = crc32c(job.image + at, section.bytes);
    std::uint32_t wanted = 0;
    {
      const std::lock_guard lock(mutex_);
      wanted = entry(job.record, s).crc;
    }
    if (found == wanted) continue;
    Job one;
    one.record = job.record;
    one.range = {s, 1};
    return Failure{
        true,
        fmt::format("{} has checksum {:08x}, what was written had {:08x}: the file was damaged "
                    "since, by a disk or another program. {}",
                    place(one, 0),
                    found,
                    wanted,
                    kAdvice)};
  }
  return std::nullopt;
}

void FileTier::Engine::close(Job& job) {
  if (!job.failure && !job.is_write && options.verify_reads) {
    fill();  // the disk works while checksums are formed
    job.failure = verify(job);
  }
  {
    const std::lock_guard lock(mutex_);
    for (int s = job.range.first; s < job.range.end(); ++s) {
      SectionEntry& e = entry(job.record, s);
      if (!job.is_write) {
        --e.readers;
        continue;
      }
      e.writing = false;
      e.written = !job.failure;
      e.crc = job.crcs[static_cast<std::size_t>(s - job.range.first)];
    }
    if (!job.failure) {
      ++(job.is_write ? counters_.writes : counters_.reads);
      (job.is_write ? counters_.bytes_written : counters_.bytes_read) += job.extent;
    }
  }
  {
    const std::lock_guard lock(job.state->mutex);
    job.state->done = true;
    job.state->failure = std::move(job.failure);
  }
  job.state->changed.notify_all();
}

// Through the page cache, keep no second copy in memory that is meant for something else.
void FileTier::Engine::past_page_cache(const Piece& p) const {
  if (p.was_direct) return;
  const auto at = static_cast<off_t>(file_offset(*p.job, p.at));
  if (p.job->is_write) ::sync_file_range(file_.fd(), at, p.bytes, SYNC_FILE_RANGE_WRITE);
  ::posix_fadvise(file_.fd(), at, p.bytes, POSIX_FADV_DONTNEED);
}

}  // namespace moesaic::tiers
