#pragma once
// `moesaic ckpt …`: one file per subcommand; they need neither MPI nor a GPU.
#include <cstdint>
#include <string>

#include "core/base/dtype.h"

namespace moesaic::apps {

/// RUN: a table of the folders of checkpoints, complete or not, with the reason.
int ckpt_list(const std::string& run, bool json);

/// RUN (all its checkpoints) or one checkpoint, PATH[@STEP]: reads and checks every byte. Throws InputError with
/// everything that is damaged, after all was looked at.
int ckpt_verify(const std::string& path);

struct InspectOptions {
  std::string pattern = "*";  ///< of tensor names
  bool json = false;
  bool config = false;  ///< the configuration instead
};
/// Values, and per tensor type, shape, bytes, norm and largest magnitude.
int ckpt_inspect(const std::string& path, const InspectOptions& options);

/// Differences of two checkpoints; returns 1 when there are any in tensors, else 0.
int ckpt_diff(const std::string& a, const std::string& b, bool json);

struct PruneOptions {
  std::int64_t keep_last = 0;   ///< at least 1
  std::int64_t keep_every = 0;  ///< 0: no such rule
  bool dry_run = false;
};
/// Deletes complete checkpoints that the rules do not keep. Throws UsageError while a run uses the folder.
int ckpt_prune(const std::string& run, const PruneOptions& options);

/// Element i as f64; fp8 and f16 are decoded.
double value_at(const std::byte* data, DType dtype, std::int64_t i);
/// "1.23 GiB"
std::string binary_bytes(double bytes);

}  // namespace moesaic::apps
