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
#include "memory/tiers/device_cache.h"
#include "memory/tiers/visits.h"

namespace moesaic {

/// The storages of one shape whose members are offloaded: one per layer with experts, in the order of declaration. Members of
/// all of them are the blocks of a set of caches: block = number in `storages` x members + member.
struct TierGroup {
  std::string name;  ///< "gate_up", "down": of the file, and in tables
  std::vector<StorageId> storages;
  std::int64_t members = 0;         ///< of a storage on this rank
  std::int64_t rows = 0, cols = 0;  ///< of a member
  std::vector<RowRange> own;        ///< by storage: the members whose state this rank keeps
  std::int64_t owned = 0;           ///< how many of all storages
  bool trained = true;              ///< has gradients and the optimizer's states
  DType weight_dtype = DType::f32;
  std::size_t weight_bytes = 0;  ///< of a member
  std::size_t gradient_bytes = 0;
  std::vector<std::pair<std::string, std::size_t>>
      state_sections;  ///< "master" or "remainder" (neither where weights are their own masters), "m", "v", …
  std::int64_t blocks() const { return static_cast<std::int64_t>(storages.size()) * members; }
  std::size_t state_bytes() const;
};

/// Bytes of the tables by which kernels find the slots of offloaded weights and gradients, on the device and once more in
/// host memory.
std::size_t slot_table_bytes(std::span<const TierGroup> groups);

/// How many slots, and what lives in the file.
struct TierGroupOptions {
  std::int64_t weight_slots = 0, gradient_slots = 0,
               state_slots = 0;  ///< on the device; 0 where nothing is offloaded
  // With gradients_in_ring block b has slot b % gradient_slots, of which there are at least as many as members.
  std::int64_t weights_in_file =
      0;  ///< blocks, from the last one on; the others live in host memory
  std::int64_t states_in_file = 0;
  /// Blocks that live on the device alone, spread evenly; each has one of the slots above for good, and no home elsewhere.
  std::int64_t weights_on_device = 0, gradients_on_device = 0, states_on_device = 0;
  std::int64_t staging_slots =
      0;  ///< of host memory, each for weights and states, where some live in the file
};

enum class TierPolicy : std::uint8_t { sched, lru, fixed, random };

struct ExpertTierOptions {
  bool weights = true;  ///< with gradients; else states alone
  /// A gradient lives from its layer's backward to the update behind it, in one of a ring of slots, and has no home.
  bool gradients_in_ring = false;
  TierPolicy policy = TierPolicy::sched;
  std::uint64_t seed = 0;  ///< of the random policy
  std::vector<std::string>
      state_kinds;  ///< what the optimizer keeps beside masters: "m", "v"; "momentum"; "average"
  std::vector<TierGroupOptions> groups;  ///< as ParameterStore::tier_groups()
  std::filesystem::path folder;          ///< of the file tier
  std::string
      file_prefix;  ///< of its files' names, so that processes of other kinds can use the folder, too
  int rank = 0;
  bool verify_reads = true;
  tiers::IoKind io = tiers::IoKind::automatic;
  Stream::Mode stream_mode = Stream::Mode::worker;
  bool poison = false;  ///< tests
};

/// What is asked of a part of a member: nothing, its values to read or to change, or room for all of them anew.
enum class MemberAccess : std::uint8_t { none, read, change, replace };

/// One member on the device, [rows, cols] each; empty where it was not asked for, or is not kept for this storage.
struct MemberTensors {
  TensorView weight;
  TensorView gradient;  ///< zeros, to be read alone, for a member without a gradient in this step
  TensorView master, remainder;   ///< one of them, or neither where the weight is its own master
  std::vector<TensorView> state;  ///< in the order of ExpertTierOptions::state_kinds
};

/// Part of a record, for checkpoints.
struct MemberPart {
  enum class Kind : std::uint8_t { weight, master, remainder, state };
  Kind kind = Kind::weight;
  int state = 0;  ///< of `state`: which kind
};

/// What a cache and its homes did so far; all kinds together where it is about one storage.
struct TierCounters {
  std::string group;  ///< TierGroup::name
  std::string kind;   ///< "weights", "gradients", "states"
  tiers::DeviceCache::Counters cache;
  std::uint64_t file_bytes_read = 0, file_bytes_written = 0;
  std::uint64_t host_waits = 0;  ///< for copies of blocks, or for the file
  double host_wait_seconds = 0;
  TierCounters& operator+=(const TierCounters& more);  ///< figures alone
};

/// Homes and caches of the experts of one rank. Weights: homes of all members here, in host memory or in the file, and a cache
/// on the device. Gradients: homes in host memory, and a cache, or a ring of slots and no homes; a member without a gradient in
/// this step counts as zero and moves nothing. States: homes of the members whose state this rank keeps, and a cache that they pass through.
///
/// All calls enqueue on the stream that they are given and are made by one thread; see memory/tiers/device_cache.h for who waits
/// for whom. Values never depend on budgets, policy or timing. Where the tiers are a pretence, and on dry streams, work gets views
/// that are never read, of all members at once, and nothing else happens.
class ExpertTiers {
 public:
  /// Allocates, unless `pretend`. `options.groups` may be empty then. Throws ResourceError as HomeTiers and DeviceCache do.
  ExpertTiers(std::vector<TierGroup> groups,
              ExpertTierOptions options,
              const Precision& precision,
              Device device,
              bool pretend);
  ~ExpertTiers();
  ExpertTiers(const ExpertTiers&) = delete;
  ExpertTiers& operator=(const ExpertTiers&) = delete;

  bool holds_weights() const;  ///< and gradients; else states alone
  /// Each layer is updated when its last backward is enqueued, before the backward of the layer before it.
  bool gradients_in_ring() const;
  bool covers(StorageId id) const;
  std::span<const TierGroup> groups() const;

  /// The visits of a step from now on, `layer` counting the storages of a group. What the caches hold stays. Without a schedule
  /// the policy `sched` is `lru`. With it the visits that are not `outside` must be those of the schedule, in its order
  /// (updates may be left out); a further call with the visit in progress is another part of it.
  void set_schedule(std::vector<tiers::Visit> step, tiers::Updates updates);
  /// No gradient has a value any more, but for those that an update which was put off waits to read.
  void begin_step();

  /// Calls `work` for runs of members whose slots are on the device: ascending in forward, descending in backward. What is
  /// added to gradients begins with zeros where the member had none in this step.
  void weights(StorageId id, const MemberVisit& visit, Stream& stream, const MemberWork& work);
  void gradients(StorageId id, const MemberVisit& visit, Stream& stream, const MemberWork& work);

  bool has_gradient(StorageId id, std::int64_t member) const;
  /// Zeros [rows, cols], to be read alone: the gradient of a member without one. Empty where gradients are resident.
  TensorView zero_gradient(StorageId id) const;

  /// The update of a storage begins; it will use these members in this order. `outside`: not where the schedule has it.
  void begin_update(StorageId id, std::span<const std::int64_t> members, bool outside = false);
  /// The update of a storage is over: its members have no gradients any more.
  void end_update(StorageId id);
  struct Access {
    MemberAccess weight = MemberAccess::none, gradient = MemberAccess::none,
                 state = MemberAccess::none;
    /// Nobody needs the gradient any more before begin_step(): it goes without a way home.
    bool last_use_of_gradient = false;
    /// The stream is another one than that of forward and backward, and neither is to wait for the other.
    bool beside = false;
  };
  /// How many members with_members() takes while as many others can be under way.
  std::int64_t members_at_once(StorageId id, const Access& access) const;
  /// Calls `work` once with some members, all on the device at the same time (so at most as many as there are slots); what it
  /// changes is on its way home afterwards.
  void with_members(StorageId id,
                    std::span<const std::int64_t> members,
                    const Access& access,
                    Stream& stream,
                    const std::function<void(std::span<const MemberTensors>)>& work);

  /// A part of a member in host memory, [rows, cols] on the CPU, once all that was enqueued for it is done; waits. What is
  /// changed or replaced becomes the value everywhere. What never had a value may be filled by several changes of parts of it.
  void with_host(StorageId id,
                 std::int64_t member,
                 MemberPart part,
                 MemberAccess access,
                 const std::function<void(TensorView)>& work);
  /// Waits until all homes have what was changed of weights and states.
  void flush();
  std::vector<TierCounters> counters() const;
  /// What the calls about a storage did, with what they made room for.
  TierCounters counters_of(StorageId id) const;
  /// Called with every visit of weights(), before its members are brought; empty ends it.
  using Observer = std::function<void(StorageId, const MemberVisit&)>;
  void observe(Observer observer);

  /// Work on the members that was put off. All calls that use members or replace their values tell it first, those that it
  /// makes itself as well, so that it can do now what they depend on. Null ends it.
  class PutOff {
   public:
    virtual ~PutOff() = default;
    /// A visit by weights() begins, or was enqueued.
    virtual void before(StorageId id, const MemberVisit& visit) = 0;
    virtual void after(StorageId id, const MemberVisit& visit) = 0;
    /// Gradients are about to be used, and nothing else.
    virtual void before_gradients() = 0;
    /// Anything else is about to happen: nothing may be put off any longer.
    virtual void finish() = 0;
    /// Whether it has yet to use the storage.
    virtual bool awaits(StorageId id) const = 0;
  };
  void set_put_off(PutOff* work);

  /// Of this rank: device memory by tag; bytes of pinned or ordinary host memory; bytes of the file.
  std::vector<MemoryUse> device_use() const;
  std::vector<MemoryUse> host_use() const;
  std::vector<MemoryUse> file_use() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
