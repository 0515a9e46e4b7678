#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory/tiers/copy_state.h"
#include "memory/tiers/file_tier.h"
#include "memory/tiers/host_pool.h"
#include "memory/tiers/visits.h"

namespace moesaic::tiers {

/// Where the records of blocks live: some in host memory for good, others in the file, with a few slots of host memory
/// (staging) that they pass through, the rest in the slots of device caches alone. Used by one thread; only transfers of the file run beside it.
class HomeTiers {
 public:
  struct Options {
    std::vector<std::uint8_t> in_file;  ///< by block: whether it lives in the file
    /// By block: whether it has no home here, because a device cache keeps the only copy. Empty: none.
    std::vector<std::uint8_t> on_device;
    std::int64_t staging_slots = 0;  ///< at least kMinStaging when a block lives in the file
    std::uint64_t host_budget = ~std::uint64_t{0};  ///< bytes, for homes and staging together
    Device device = kCpu;                           ///< whose copies the host memory is for
    bool poison = false;     ///< tests: staging slots that are free hold NaNs
    FileTier::Options file;  ///< without the number of records, which follows
    IoKind io = IoKind::automatic;
    int io_depth = 8;
  };
  static constexpr std::int64_t kMinStaging = 2;  ///< one that is leased, one on its way

  /// Host memory of so many blocks, `in_file` of them in the file.
  static std::uint64_t host_bytes_for(const RecordLayout& layout,
                                      std::int64_t blocks,
                                      std::int64_t in_file,
                                      std::int64_t staging_slots);

  /// `queue`: null, or a queue in place of the one that Options name (tests). Throws as HostPool and FileTier.
  HomeTiers(const RecordLayout& layout, Options options, OpenedQueue queue = {});
  ~HomeTiers();
  HomeTiers(const HomeTiers&) = delete;
  HomeTiers& operator=(const HomeTiers&) = delete;

  enum class Contents : std::uint8_t {
    needed,    ///< the sections are read from the file if they are not in host memory
    replaced,  ///< the holder writes all of them
  };
  struct Lease {
    std::byte* image = nullptr;  ///< the record, aligned; the sections at their offsets
    /// Work of earlier leases that may still be under way: let streams wait for it before they touch the sections.
    std::vector<Event> pending;
  };
  /// Sections of a block in host memory, for the caller alone until release(). Waits for the file where it must, and for
  /// the oldest lease in its last work where no staging slot is free. May throw what a transfer failed with; then nothing
  /// is leased, and the call may be tried again: no values are lost by a failed transfer. InternalError when the block lives on the device, when the section is
  /// leased already, when it never had values, or when all staging slots are leased and not released.
  Lease lease(Block block, SectionRange range, Contents contents);
  /// Ends a lease when the work before `after` is done (at once without). Of `changed` (within the range; none: nothing)
  /// the file then gets the new values, in the background. Another lease of the very same range need not wait on the host.
  void release(Block block,
               SectionRange range,
               std::optional<SectionRange> changed,
               const std::optional<Event>& after = std::nullopt);
  /// Whether the sections were ever given values, wherever these are.
  bool has_values(Block block, SectionRange range);
  /// Starts reading sections from the file, unless they are there or on their way. False when there is no slot for them
  /// now. Never waits. What was read so stays until it is leased, others than prefetch() need its slot, or
  /// forget_prefetched().
  bool prefetch(Block block, SectionRange range);
  /// Nobody waits for what was prefetched and not leased yet.
  void forget_prefetched();
  /// Whether lease(…, needed) would return at once.
  bool is_ready(Block block, SectionRange range);
  /// Ends the leases whose work is done, and notes which transfers are.
  void poll();
  /// Waits until the file has everything that was released. Throws what a write failed with; call it again to try again.
  void flush();
  /// How often the host waited for a lease's work, how often for the file, and for how long.
  std::uint64_t lease_waits() const noexcept { return lease_waits_; }
  std::uint64_t file_waits() const noexcept { return file_waits_; }
  double lease_wait_seconds() const noexcept { return lease_wait_seconds_; }
  double file_wait_seconds() const noexcept { return file_wait_seconds_; }

  bool lives_in_file(Block block) const {
    return options_.in_file.at(static_cast<std::size_t>(block)) != 0;
  }
  bool lives_on_device(Block block) const {
    return !options_.on_device.empty() &&
           options_.on_device.at(static_cast<std::size_t>(block)) != 0;
  }
  const RecordLayout& layout() const noexcept { return layout_; }
  Block blocks() const noexcept { return static_cast<Block>(options_.in_file.size()); }
  const FileTier* file() const noexcept {
    return file_.get();
  }  ///< null when all live in host memory
  std::uint64_t host_bytes() const noexcept { return host_bytes_; }

 private:
  struct Running {
    Transfer transfer;
    SectionRange range;
    bool is_write = false;
  };
  struct Held {
    SectionRange range;
    std::optional<SectionRange> changed;
    std::vector<Event> after;
    bool is_open = true;  ///< not released yet
  };
  /// A record in host memory: each section is a copy of its own, of what the file has. While it is leased, and until the
  /// lease's work is done, it has the writer's pin.
  struct Entry {
    std::byte* image = nullptr;
    std::vector<BlockCopy> sections;
    std::vector<Running> running;
    std::vector<Held> held;
    std::uint64_t last_lease = 0;
    bool is_expected = false;  ///< prefetched and not leased yet

    BlockCopy& section(int s) { return sections[static_cast<std::size_t>(s)]; }
  };

  void set_up(Block block, Entry& entry, std::byte* image);
  Entry* find(Block block);  ///< null when it is not in host memory
  Entry* stage(Block block, bool may_wait);
  bool make_room(bool may_wait);
  void start(Block block, Entry& entry, SectionRange range, bool is_write);
  void start_where(Block block, Entry& entry, SectionRange range, CopyState state, bool is_write);
  void finish(Entry& entry, std::size_t running);
  void settle(Entry& entry, SectionRange range);
  void end(Block block, Entry& entry, std::size_t held);
  void end_overlapping(Block block, Entry& entry, SectionRange range);
  bool end_oldest();
  void check(Block block, SectionRange range) const;

  RecordLayout layout_;
  Options options_;
  std::uint64_t host_bytes_ = 0;
  std::unique_ptr<HostPool> homes_, staging_;
  std::unique_ptr<FileTier> file_;
  std::vector<std::int64_t>
      place_;  ///< by block: its record in the file, or its number among those at home in host memory
  std::vector<Entry> at_home_;
  std::unordered_map<Block, Entry> staged_;
  std::deque<Block> deferred_;  ///< of leases in their last work, in the order of release()
  std::uint64_t leases_ = 0, lease_waits_ = 0, file_waits_ = 0;
  double lease_wait_seconds_ = 0, file_wait_seconds_ = 0;
};

}  // namespace moesaic::tiers
