#pragma once
// Experts that do not fit on the device: what lies where, and how it comes to the kernels.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/tensor.h"
#include "core/nn/member_run.h"
#include "core/nn/parameter_store.h"
#include "memory/buffer.h"
#include "memory/stream.h"
#include "memory/tiers/file_tier.h"
#include "memory/tiers/visits.h"

namespace moesaic {

/// The storages of one shape whose members are offloaded: one per layer with experts, in the order of declaration. Members of
/// all of them are the blocks of a set of caches: block = number in `storages` x members + member.
struct TierGroup {
  std::string name;  ///< "gate_up", "down": of the file, and in tables
  std::vector<StorageId> storages;
  std::int64_t members = 0;         ///< of a storage on this rank
  std::int64_t rows = 0, cols = 0;  ///< of a member
  std::int64_t owned = 0;           ///< members of all storages whose state this rank keeps
  bool trained = true;              ///< has gradients and states
  std::size_t weight_bytes = 0;     ///< of a member
  std::size_t gradient_bytes = 0;
  std::vector<std::pair<std::string, std::size_t>>
      state_sections;  ///< "master" or "remainder", "m", "v", …
  std::int64_t blocks() const { return static_cast<std::int64_t>(storages.size()) * members; }
  std::size_t state_bytes() const;
};

/// How many slots, and what lives in the file.
struct TierGroupOptions {
  std::int64_t weight_slots = 0, gradient_slots = 0,
               state_slots = 0;  ///< on the device; 0 where nothing is offloaded
  std::int64_t weights_in_file =
      0;  ///< blocks, from the last one on; the others live in host memory
  std::int64_t states_in_file = 0;
  std::int64_t staging_slots =
      0;  ///< of host memory, each for weights and states, where some live in the file
};

enum class TierPolicy : std::uint8_t { sched, lru, fixed, random };

struct ExpertTierOptions {
  bool weights = true;  ///< with gradients; else states alone
  TierPolicy policy = TierPolicy::sched;
  std::uint64_t seed = 0;  ///< of the random policy
  std::vector<std::string>
      state_kinds;  ///< what the optimizer keeps beside masters: "m", "v"; "momentum"; "average"
  std::vector<TierGroupOptions> groups;  ///< as ParameterStore::tier_groups()
  std::filesystem::path folder;          ///< of the file tier
  int rank = 0;
  bool verify_reads = true;
  Stream::Mode stream_mode = Stream::Mode::worker;
  bool poison = false;  ///< tests
};

/// What is asked of a part of a member: nothing, its values to read or to change, or room for all of them anew.
enum class MemberAccess : std::uint8_t { none, read, change, replace };

/// One member on the device, [rows, cols] each; empty where it was not asked for, or is not kept for this storage.
struct MemberTensors {
  TensorView weight, gradient;
  TensorView master,
      remainder;  ///< as ParameterStore::master() and remainder(): one of them, or neither
  std::vector<TensorView> state;  ///< in the order of ExpertTierOptions::state_kinds
};

/// Part of a record, for checkpoints.
struct MemberPart {
  enum class Kind : std::uint8_t { weight, master, remainder, state };
  Kind kind = Kind::weight;
  int state = 0;  ///< of `state`: which kind
};

/// Homes and caches of the experts of one rank. Weights: homes of all members here, in host memory or in the file, and a cache
/// on the device. Gradients: homes in host memory, and a cache; a member without a gradient in this step counts as zero and
/// moves nothing. States: homes of the members whose state this rank keeps, and a cache that they pass through.
///
/// All calls enqueue on the stream that they are given and are made by one thread; see memory/tiers/device_cache.h for who waits
/// for whom. Values never depend on budgets, policy or timing.
class ExpertTiers {
 public:
  /// Allocates, unless `pretend`. Throws ResourceError as HomeTiers and DeviceCache do.
  ExpertTiers(std::vector<TierGroup> groups,
              ExpertTierOptions options,
              const Precision& precision,
              Device device,
              bool pretend);
  ~ExpertTiers();
  ExpertTiers(const ExpertTiers&) = delete;
  ExpertTiers& operator=(const ExpertTiers&) = delete;

  bool holds_weights() const;  ///< and gradients; else states alone
  bool covers(StorageId id) const;
  std::span<const TierGroup> groups() const;

  /// The visits of a step from now on, `layer` counting the storages of a group. What the caches hold stays.
  void set_schedule(std::vector<tiers::Visit> step, tiers::Updates updates);
  /// No gradient has a value any more.
  void begin_step();

  /// Calls `work` for runs of members whose slots are on the device: ascending in forward, descending in backward.
  void weights(StorageId id, const MemberVisit& visit, Stream& stream, const MemberWork& work);
  void gradients(StorageId id, const MemberVisit& visit, Stream& stream, const MemberWork& work);

  /// The update of a storage begins; it will use these members in this order.
  void begin_update(StorageId id, std::span<const std::int64_t> members);
  struct Access {
    MemberAccess weight = MemberAccess::none, gradient = MemberAccess::none,
                 state = MemberAccess::none;
  };
  /// Calls `work` once with some members, all on the device at the same time; what it changes is on its way home afterwards.
  void with_members(StorageId id,
                    std::span<const std::int64_t> members,
                    const Access& access,
                    Stream& stream,
                    const std::function<void(std::span<const MemberTensors>)>& work);

  /// A part of a member in host memory, [rows, cols] on the CPU, once all that was enqueued for it is done; waits. What is
  /// changed or replaced becomes the value everywhere.
  void with_host(StorageId id,
                 std::int64_t member,
                 MemberPart part,
                 MemberAccess access,
                 const std::function<void(TensorView)>& work);
  /// Waits until all homes have what was changed.
  void flush();

  /// Of this rank: device memory by tag; bytes of pinned or ordinary host memory; bytes of the file.
  std::vector<MemoryUse> device_use() const;
  std::vector<MemoryUse> host_use() const;
  std::vector<MemoryUse> file_use() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
