#include "memory/tiers/copy_state.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tiers {

const char* name(CopyState state) noexcept {
  switch (state) {
    case CopyState::absent:
      return "absent";
    case CopyState::loading:
      return "loading";
    case CopyState::clean:
      return "clean";
    case CopyState::dirty:
      return "dirty";
    case CopyState::writing:
      return "writing";
  }
  return "?";
}

const char* name(CopyAction action) noexcept {
  switch (action) {
    case CopyAction::begin_load:
      return "begin_load";
    case CopyAction::finish_load:
      return "finish_load";
    case CopyAction::fail_load:
      return "fail_load";
    case CopyAction::make:
      return "make";
    case CopyAction::change:
      return "change";
    case CopyAction::begin_write:
      return "begin_write";
    case CopyAction::finish_write:
      return "finish_write";
    case CopyAction::fail_write:
      return "fail_write";
    case CopyAction::drop:
      return "drop";
    case CopyAction::discard:
      return "discard";
  }
  return "?";
}

std::optional<CopyState> state_after(CopyState state, CopyAction action) noexcept {
  using S = CopyState;
  using A = CopyAction;
  switch (state) {
    case S::absent:
      if (action == A::begin_load) return S::loading;
      if (action == A::make) return S::dirty;
      break;
    case S::loading:
      if (action == A::finish_load) return S::clean;
      if (action == A::fail_load) return S::absent;
      break;
    case S::clean:
      if (action == A::change) return S::dirty;
      if (action == A::drop || action == A::discard) return S::absent;
      break;
    case S::dirty:
      if (action == A::change) return S::dirty;
      if (action == A::begin_write) return S::writing;
      if (action == A::discard) return S::absent;
      break;
    case S::writing:
      if (action == A::finish_write) return S::clean;
      if (action == A::fail_write) return S::dirty;
      break;
  }
  return std::nullopt;
}

BlockCopy::BlockCopy(std::int64_t block, int sections, Device device, int first_section)
    : ready(device),
      block_(block),
      device_(device),
      first_section_(first_section),
      states_(static_cast<std::size_t>(sections), CopyState::absent) {
  MOESAIC_CHECK(sections > 0 && sections <= kMaxSections, "sections of a copy");
}

void BlockCopy::illegal(const std::string& what) const {
  throw InternalError(fmt::format("copy of block {}: {} ({} readers, {} writer)",
                                  block_,
                                  what,
                                  readers_,
                                  writer_ ? "a" : "no"));
}

void BlockCopy::check(SectionRange range) const {
  if (range.first < 0 || range.count <= 0 || range.end() > static_cast<int>(states_.size()))
    illegal(fmt::format("sections {} to {} of {}", range.first, range.end(), states_.size()));
}

bool BlockCopy::all(SectionRange range, CopyState wanted) const {
  check(range);
  return std::all_of(states_.begin() + range.first,
                     states_.begin() + range.end(),
                     [&](CopyState s) { return s == wanted; });
}
bool BlockCopy::any(SectionRange range, CopyState wanted) const {
  check(range);
  return std::any_of(states_.begin() + range.first,
                     states_.begin() + range.end(),
                     [&](CopyState s) { return s == wanted; });
}

bool BlockCopy::may_go() const {
  return !is_pinned() && std::all_of(states_.begin(), states_.end(), [](CopyState s) {
    return s == CopyState::absent || s == CopyState::clean;
  });
}

void BlockCopy::apply(SectionRange range, CopyAction action) {
  check(range);
  const bool is_empty = all({0, static_cast<int>(states_.size())}, CopyState::absent);
  const auto refuse = [&](const char* why) { illegal(fmt::format("{}: {}", name(action), why)); };
  switch (action) {
    case CopyAction::make:
      if (!writer_ && !is_empty) refuse("whoever writes has the writer's pin");
      break;
    case CopyAction::change:
      if (!writer_) refuse("whoever writes has the writer's pin");
      break;
    case CopyAction::begin_write:
      if (writer_) refuse("it is being changed");
      break;
    case CopyAction::drop:
    case CopyAction::discard:
      if (is_pinned()) refuse("it is in use");
      break;
    default:
      break;
  }
  for (int s = range.first; s < range.end(); ++s) {
    if (!state_after(state(s), action))
      illegal(fmt::format(
          "section {} is {}, {} is illegal", first_section_ + s, name(state(s)), name(action)));
  }
  for (int s = range.first; s < range.end(); ++s)
    states_[static_cast<std::size_t>(s)] = *state_after(state(s), action);
}

void BlockCopy::pin(Access access) {
  const SectionRange whole{0, static_cast<int>(states_.size())};
  if (all(whole, CopyState::absent)) illegal("pin: nothing is here");
  if (writer_) illegal("pin: somebody writes");
  if (access == Access::read) {
    ++readers_;
    return;
  }
  if (readers_ > 0) illegal("pin to write: somebody reads");
  if (any(whole, CopyState::writing) || any(whole, CopyState::loading))
    illegal("pin to write: a section is on its way");
  writer_ = true;
}

void BlockCopy::unpin(Access access) {
  if (access == Access::read ? readers_ == 0 : !writer_) illegal("unpin: there is no such pin");
  if (access == Access::read) {
    --readers_;
  } else {
    writer_ = false;
  }
}

void BlockCopy::unpin(Access access, Stream& stream) {
  unpin(access);
  std::erase_if(uses_, [](const Event& e) { return e.reached(); });
  Event use(device_);
  stream.record(use);
  uses_.push_back(use);
}

void BlockCopy::wait_for_uses(Stream& stream) const {
  for (const Event& e : uses_)
    stream.wait(e);
}

bool BlockCopy::uses_are_over() const {
  return std::all_of(uses_.begin(), uses_.end(), [](const Event& e) { return e.reached(); });
}

}  // namespace moesaic::tiers
