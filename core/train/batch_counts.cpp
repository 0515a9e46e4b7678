#include "core/train/batch_counts.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace moesaic {

BatchCounts over_ranks(const BatchCounts& own, Communicator* world) {
  if (world == nullptr || world->size() == 1) return own;
  const std::string bytes(reinterpret_cast<const char*>(&own), sizeof own);
  BatchCounts all;
  for (const std::string& from : world->all_gather_host(bytes)) {
    BatchCounts c;
    MOESAIC_CHECK(from.size() == sizeof c, "a rank of another build");
    std::memcpy(&c, from.data(), sizeof c);
    all.valid_targets += c.valid_targets;
    all.mtp_targets += c.mtp_targets;
    all.documents += c.documents;
    all.tokens += c.tokens;
    all.stop_wish = std::max(all.stop_wish, c.stop_wish);
  }
  return all;
}

}  // namespace moesaic
