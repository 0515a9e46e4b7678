#pragma once
// A copy of a block in a faster tier, and what may be done with it when. Host code alone: who moves the bytes is elsewhere.
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/stream.h"
#include "memory/tiers/record_layout.h"

namespace moesaic::tiers {

/// Of one section of a copy. "Below" is the tier that the copy was made from.
enum class CopyState : std::uint8_t {
  absent,   ///< nothing here
  loading,  ///< on its way up; may be used by who waits for `ready`
  clean,    ///< the same bits as below
  dirty,    ///< newer than below
  writing,  ///< newer than below, on its way down; may be read, not changed
};
constexpr std::array<CopyState, 5> kCopyStates{
    CopyState::absent, CopyState::loading, CopyState::clean, CopyState::dirty, CopyState::writing};
const char* name(CopyState state) noexcept;

enum class CopyAction : std::uint8_t {
  begin_load,
  finish_load,
  fail_load,
  make,  ///< written here for the first time, without a look at what is below
  change,
  begin_write,
  finish_write,
  fail_write,
  drop,  ///< given up; below has the same bits
  discard,  ///< given up although it may be newer: below holds other values now (a checkpoint was loaded)
};
constexpr std::array<CopyAction, 10> kCopyActions{CopyAction::begin_load,
                                                  CopyAction::finish_load,
                                                  CopyAction::fail_load,
                                                  CopyAction::make,
                                                  CopyAction::change,
                                                  CopyAction::begin_write,
                                                  CopyAction::finish_write,
                                                  CopyAction::fail_write,
                                                  CopyAction::drop,
                                                  CopyAction::discard};
const char* name(CopyAction action) noexcept;

/// The table of docs/memory.md; nothing for what is illegal.
std::optional<CopyState> state_after(CopyState state, CopyAction action) noexcept;

enum class Access : std::uint8_t { read, write };

/// A block's copy: states of its sections, who uses it, and the points in the streams that order its memory.
///
/// Pins are taken and given back by the host in the order in which it enqueues work: any number of readers, or one writer.
/// Every illegal transition or pin is an InternalError that names block, section, state and action, and changes nothing.
class BlockCopy {
 public:
  /// `first_section`: what messages call section 0.
  BlockCopy(std::int64_t block, int sections, Device device, int first_section = 0);

  std::int64_t block() const noexcept { return block_; }
  CopyState state(int section) const { return states_.at(static_cast<std::size_t>(section)); }
  /// Whether all sections of the range are in that state.
  bool all(SectionRange range, CopyState state) const;
  bool any(SectionRange range, CopyState state) const;
  bool is_pinned() const noexcept { return readers_ > 0 || writer_; }
  /// Nobody uses it and below has all of it: its memory may get another block.
  bool may_go() const;

  /// Rules beside the table: `make` and `change` need the writer's pin (`make` on a copy that holds nothing does not),
  /// `begin_write` that there is no writer, `drop` and `discard` that there is no pin.
  void apply(SectionRange range, CopyAction action);
  /// Needs a section that is not absent. A writer needs that nobody else has a pin and that no section is on its way.
  void pin(Access access);
  void unpin(Access access);
  /// unpin() of work enqueued on `stream`: the memory is in use until that is done.
  void unpin(Access access, Stream& stream);
  /// Lets `stream` wait for all uses so far (before it overwrites or reads changes).
  void wait_for_uses(Stream& stream) const;
  bool uses_are_over() const;
  const std::vector<Event>& uses() const noexcept { return uses_; }

  Event ready;  ///< when what was loaded last may be used

 private:
  [[noreturn]] void illegal(const std::string& what) const;
  void check(SectionRange range) const;

  std::int64_t block_;
  Device device_;
  int first_section_;
  std::vector<CopyState> states_;
  int readers_ = 0;
  bool writer_ = false;
  std::vector<Event> uses_;
};

}  // namespace moesaic::tiers
