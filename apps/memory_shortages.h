#pragma once
// One message of what several ranks, or the stages of a pipeline, lack.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/base/memory_shortage.h"

namespace moesaic::apps {

/// What a rank or a stage lacks; nothing: it has enough.
using Shortage = std::optional<MemoryShortage>;

/// The largest need of all, of the device before that of host memory; with both, it tells both. `who(i)`, as in "stage 2", is said
/// where not all need the same. Nothing where none lacks anything.
Shortage largest(const std::vector<Shortage>& all, const std::function<std::string(int)>& who);

/// All ranks call it: each calls `plan`, and all throw the largest of the MemoryShortages that it threw on them, so that one
/// correction is enough. Nobody returns before `plan` has returned everywhere.
void plan_on_all_ranks(Communicator& host,
                       const std::function<void()>& plan,
                       const std::function<std::string(int)>& who);

/// In a form that travels between ranks; empty: nothing is lacking.
std::string packed(const Shortage& shortage);
/// What packed() made.
Shortage unpacked_shortage(const std::string& text);

}  // namespace moesaic::apps
