#include "memory/tiers/copy_state.h"

#include <atomic>
#include <functional>
#include <map>
#include <thread>

#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;

TEST_CASE("copy states: exactly these transitions are legal") {
  using S = CopyState;
  using A = CopyAction;
  const std::map<std::pair<S, A>, S> legal{{{S::absent, A::begin_load}, S::loading},
                                           {{S::absent, A::make}, S::dirty},
                                           {{S::loading, A::finish_load}, S::clean},
                                           {{S::loading, A::fail_load}, S::absent},
                                           {{S::clean, A::change}, S::dirty},
                                           {{S::clean, A::drop}, S::absent},
                                           {{S::clean, A::discard}, S::absent},
                                           {{S::dirty, A::change}, S::dirty},
                                           {{S::dirty, A::begin_write}, S::writing},
                                           {{S::dirty, A::discard}, S::absent},
                                           {{S::writing, A::finish_write}, S::clean},
                                           {{S::writing, A::fail_write}, S::dirty}};
  int checked = 0;
  for (const S s : kCopyStates) {
    for (const A a : kCopyActions) {
      INFO(name(s) << " " << name(a));
      const auto wanted = legal.find({s, a});
      CHECK(state_after(s, a) ==
            (wanted == legal.end() ? std::nullopt : std::optional(wanted->second)));
      ++checked;
    }
  }
  CHECK(checked == 50);
}

// One section with its values, as numbers: what is here and below, and which is the newest. Says by what a step would do
// to them whether it is safe, without the table.
struct Values {
  int here = -1, below = 0, newest = 0;
  bool loading = false, writing = false;
  int readers = 0, writers = 0;

  bool holds() const { return here >= 0; }
  // Whether it went through; else nothing changed.
  bool act(CopyAction a) {
    const bool still = !loading && !writing;
    switch (a) {
      case CopyAction::begin_load:  // may not overwrite a value
        if (holds() || loading) return false;
        return loading = true;
      case CopyAction::finish_load:
        if (!loading) return false;
        here = below;
        loading = false;
        return true;
      case CopyAction::fail_load:
        if (!loading || writing) return false;
        loading = false;
        return true;
      case CopyAction::make:
        if (holds() || loading) return false;
        here = ++newest;
        return true;
      case CopyAction::change:  // under the writer's pin, and nothing else may be at the memory
        if (!holds() || !still || writers != 1) return false;
        here = ++newest;
        return true;
      case CopyAction::begin_write:  // what is below already need not go there
        if (!holds() || here == below || !still || writers > 0) return false;
        return writing = true;
      case CopyAction::finish_write:
        if (!writing) return false;
        below = here;
        writing = false;
        return true;
      case CopyAction::fail_write:
        if (!writing) return false;
        writing = false;
        return true;
      case CopyAction::drop:  // the newest value must stay somewhere
        if (!holds() || !still || below != here || readers + writers > 0) return false;
        here = -1;
        return true;
      case CopyAction::discard:
        if (!holds() || !still || readers + writers > 0) return false;
        here = -1;
        below = ++newest;  // what was loaded below
        return true;
    }
    return false;
  }
  bool pin(Access access) {
    if ((!holds() && !loading) || writers > 0) return false;
    if (access == Access::read) return ++readers > 0;
    if (readers > 0 || loading || writing) return false;
    return ++writers > 0;
  }
  bool unpin(Access access) {
    int& pins = access == Access::read ? readers : writers;
    if (pins == 0) return false;
    --pins;
    return true;
  }
};

bool goes(const std::function<void()>& f) {
  try {
    f();
    return true;
  } catch (const InternalError&) {
    return false;
  }
}

int explored = 0;

void explore(const BlockCopy& copy, const Values& values, int depth) {
  ++explored;
  const CopyState s = copy.state(0);
  // The newest value is never lost, and the state says what is where.
  REQUIRE((values.here == values.newest || values.below == values.newest));
  REQUIRE((s == CopyState::absent) == (!values.holds() && !values.loading));
  REQUIRE((s == CopyState::loading) == values.loading);
  REQUIRE((s == CopyState::writing) == values.writing);
  REQUIRE((s == CopyState::dirty) ==
          (values.holds() && values.here != values.below && !values.writing));
  REQUIRE(copy.is_pinned() == (values.readers + values.writers > 0));
  if (copy.may_go()) {
    REQUIRE(values.below == values.newest);
    REQUIRE(values.readers + values.writers == 0);
  }
  if (depth == 0) return;
  for (const CopyAction a : kCopyActions) {
    BlockCopy c = copy;
    Values v = values;
    const bool safe = v.act(a);
    if (goes([&] { c.apply({0, 1}, a); }) != safe) {
      INFO(name(s) << " " << name(a) << " readers " << values.readers << " writers "
                   << values.writers);
      REQUIRE(false);
    }
    if (safe) explore(c, v, depth - 1);
  }
  for (const Access access : {Access::read, Access::write}) {
    BlockCopy c = copy;
    Values v = values;
    const bool safe = v.pin(access);
    REQUIRE(goes([&] { c.pin(access); }) == safe);
    if (safe) explore(c, v, depth - 1);
    c = copy;
    v = values;
    const bool had = v.unpin(access);
    REQUIRE(goes([&] { c.unpin(access); }) == had);
    if (had) explore(c, v, depth - 1);
  }
}

TEST_CASE(
    "copy states: in every sequence of steps what is allowed is what loses and tears nothing") {
  explored = 0;
  explore(BlockCopy(5, 1, kCpu), Values{}, 9);
  CHECK(explored > 10000);
}

TEST_CASE("copy states: sections on their own; an illegal step names them and changes nothing") {
  BlockCopy copy(77, 4, kCpu);
  copy.apply({0, 2}, CopyAction::begin_load);
  copy.apply({2, 2}, CopyAction::begin_load);
  copy.apply({0, 2}, CopyAction::finish_load);
  const std::string text = message_of<InternalError>([&] {
    copy.apply({0, 4}, CopyAction::finish_load);
  });
  CHECK(contains(text, "block 77"));
  CHECK(contains(text, "section 0 is clean, finish_load is illegal"));
  CHECK(copy.all({0, 2}, CopyState::clean));
  CHECK(copy.all({2, 2}, CopyState::loading));
  CHECK(!copy.may_go());
  copy.pin(Access::read);
  copy.apply({2, 2}, CopyAction::finish_load);
  CHECK(contains(message_of<InternalError>([&] {
                   copy.apply({0, 1}, CopyAction::drop);
                 }),
                 "drop: it is in use"));
  copy.unpin(Access::read);
  copy.pin(Access::write);
  copy.apply({1, 1}, CopyAction::change);
  CHECK(contains(message_of<InternalError>([&] { copy.pin(Access::read); }), "somebody writes"));
  copy.unpin(Access::write);
  CHECK(copy.state(0) == CopyState::clean);
  CHECK(copy.any({0, 4}, CopyState::dirty));
  CHECK_THROWS_AS(copy.apply({0, 4}, CopyAction::drop), InternalError);
  copy.apply({1, 1}, CopyAction::begin_write);
  copy.pin(Access::read);  // may be read while it is written back
  CHECK_THROWS_AS(copy.pin(Access::write), InternalError);
  copy.unpin(Access::read);
  copy.apply({1, 1}, CopyAction::finish_write);
  CHECK(copy.may_go());
  copy.apply({0, 4}, CopyAction::drop);
  CHECK_THROWS_AS(copy.pin(Access::read), InternalError);
  CHECK_THROWS_AS(copy.apply({3, 2}, CopyAction::begin_load), InternalError);
}

TEST_CASE("copy states: memory is in use until the streams that used it are through") {
  BlockCopy copy(1, 1, kCpu);
  copy.apply({0, 1}, CopyAction::make);
  Stream slow(kCpu, "slow"), other(kCpu, "other");
  std::atomic<bool> go{false};
  std::atomic<int> order{0};
  int read = 0, overwritten = 0;
  copy.pin(Access::read);
  slow.enqueue([&] {
    while (!go)
      std::this_thread::yield();
    read = ++order;
  });
  copy.unpin(Access::read, slow);
  CHECK(!copy.is_pinned());  // on the host
  CHECK(!copy.uses_are_over());
  copy.wait_for_uses(other);
  other.enqueue([&] { overwritten = ++order; });
  go = true;
  other.synchronize();
  CHECK(read == 1);
  CHECK(overwritten == 2);
  CHECK(copy.uses_are_over());
}

}  // namespace
}  // namespace moesaic::test
