#pragma once
#include "comm/communicator.h"
#include "parallel/dispatch/volumes.h"

namespace moesaic {

/// What ranks get through their links when all of them send to all peers of a kind at once, as an exchange does: the
/// median of a few such rounds, in messages that grow until a round takes long enough to be measured. A kind without peers
/// keeps its default. The same on all ranks; blocks the host, and takes up to a second. For `auto`.
LinkSpeeds measure_link_speeds(Communicator& group, const NodeGrid& grid, Device device);

}  // namespace moesaic
