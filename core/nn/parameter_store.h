#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/tensor.h"
#include "core/nn/member_run.h"
#include "kernels/ops/initial_values.h"
#include "memory/buffer.h"
#include "memory/stream.h"
#include "parallel/expert_replicas.h"
#include "parallel/placement.h"

namespace moesaic {

class ExpertTiers;
struct ExpertTierOptions;
struct TierGroup;

/// How a parameter starts (InitialValues says what a and b are). The values depend on (seed, logical name, element
/// index) alone, so that every layout and backend starts from the same bits.
struct Init {
  using Kind = InitialKind;
  Kind kind = Kind::normal;
  double a = 0.02;
  double b = 0.0;
};

/// The type in which kernels read a weight: the compute type of the run, or the statistics type (weights that stay in
/// f32 in a bf16 model: A_log, dt_bias, convolutions, router).
enum class StoredAs : std::uint8_t { compute, stats };

/// What a parameter is part of, for the tables of `plan`.
enum class Part : std::uint8_t {
  embedding,
  head,
  norm,
  kda,
  mla,
  indexer,
  dense_mlp,
  router,
  latent,
  shared_expert,
  routed_expert,
  attn_res,
  mtp
};
const char* name(Part part) noexcept;

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct ParamId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};
struct StorageId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};
struct BufferId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};
struct PlacesId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};

/// A logical tensor: what optimizers, checkpoints and conversions see. A family ("…experts.{}.w1.weight", members > 1)
/// is `members` tensors of one shape. All sizes are those of the whole tensor, in any layout.
struct ParameterSpec {
  std::string name;  ///< as in the published checkpoints; "{}" stands for the member of a family
  Shape shape;       ///< of one member, as in the checkpoint
  std::int64_t members = 0;  ///< 0: a single tensor; > 0: a family
  Placement placement = {};  ///< of [members, shape…] for families, else of shape
  StoredAs stored_as = StoredAs::compute;
  Init init;
  Part part = Part::norm;
  bool decay = false;   ///< weight decay applies
  bool matrix = false;  ///< optimised by Muon when the optimizer is Muon
  std::vector<RowRange>
      blocks;  ///< row blocks that Muon treats as matrices of their own (per-head Muon); empty: whole
  PlacesId places;                  ///< families: which member is where, when that may change
  std::int64_t active_members = 0;  ///< members that one token uses (families); for counting
  BufferId
      use_counts;  ///< families: the step's buffer [members] that counts the tokens of each; may be invalid
  bool has_copy =
      false;  ///< another pipeline stage holds it too; both keep its whole state, which is never sharded
  bool is_copy = false;  ///< the other stage speaks for it
  std::int64_t count() const { return shape.numel() * (members > 0 ? members : 1); }
};

/// persistent: part of the checkpoint. step: starts each step at its neutral value and is reduced over the ranks that see
/// different tokens before it is used.
enum class Lifetime : std::uint8_t { persistent, step };
enum class BufferReduce : std::uint8_t { none, sum, max };

/// A tensor that is not optimised: router bias, quantile histogram, expert counts, largest logits, …
struct BufferSpec {
  std::string name;
  Shape shape;
  DType dtype = DType::f32;
  bool is_parameter_in_checkpoint = false;  ///< counted as a model tensor (e_score_correction_bias)
  /// About where things are: checkpoints may lack it, and runs may have no use for it.
  bool is_optional = false;
  Part part = Part::router;
  Lifetime lifetime = Lifetime::persistent;
  BufferReduce reduce = BufferReduce::none;
  double initial = 0;  ///< value of every element at the start (floating buffers)
  std::string checkpoint_name() const;
};

/// Access to a weight for the time of its scope. When weights are resident it is just the view; when they are offloaded
/// it waits for the copy. Nobody keeps the view beyond the scope.
class WeightLease {
 public:
  explicit WeightLease(ConstTensorView view) noexcept : view_(view) {}
  WeightLease(const WeightLease&) = delete;
  WeightLease& operator=(const WeightLease&) = delete;
  ConstTensorView view() const noexcept { return view_; }
  operator ConstTensorView() const noexcept {
    return view_;
  }  // NOLINT(google-explicit-constructor)

 private:
  ConstTensorView view_;
};

/// How masters and optimizer state are dealt to the ranks that sum a gradient, each of which keeps and updates its own
/// part (ZeRO-1). Parts are cut between RowBlocks, families between members; what is named here stays in one piece.
struct StateSharding {
  std::int64_t bucket_bytes = std::int64_t{32} << 20;  ///< least gradients that are summed at once
  bool whole_matrices = false;  ///< parameters declared with `matrix` are cut between members only
  std::vector<std::pair<std::string, std::string>>
      together;  ///< pairs of single tensors, by name, that need one owner and no cut
};

/// All persistent tensors of a model on one rank. First declare, then seal() once; no allocation afterwards.
///
/// A *storage* is what kernels read: [rows, cols] or, for families, [slots, rows, cols]. A logical parameter is a range
/// of rows in a storage (gate and up projections share one); the slot of a family's member is a table, identity here.
/// Weights, masters, gradients each lie in one buffer in declaration order, gradients that are summed over other ranks
/// apart, so that a reduction is one call over one span and the order of sums follows the declarations.
///
/// In a layout the store holds this rank's block of every parameter (spec.placement): some members of a family, some rows
/// or columns of a tensor. Members are counted from 0 on each rank; names and initial values are those of the whole. Which
/// number in the whole family a rank's members have is a table where the family names one (declare_places()), else they
/// are a run.
class ParameterStore {
 public:
  explicit ParameterStore(const Precision& precision, MeshPosition position = {})
      : precision_(precision), position_(std::move(position)) {}
  const MeshPosition& position() const noexcept { return position_; }

  /// A storage with the given rows per slot, to be filled by declare(spec, storage, first_row). Sizes and first_row are
  /// those of this rank.
  StorageId declare_storage(const std::string& name,
                            std::int64_t members,
                            std::int64_t rows,
                            std::int64_t cols,
                            StoredAs stored_as);
  /// Throws UsageError when the layout does not divide the parameter.
  ParamId declare(ParameterSpec spec, StorageId storage, std::int64_t first_row);
  /// A parameter with a storage of its own, shaped like the parameter (families: [members, …]).
  StorageId declare(ParameterSpec spec);
  BufferId declare_buffer(BufferSpec spec);
  /// Where the `members` members of families are that are spread over Axis::ep alike, as those of a layer: member m at place
  /// rank * (members / ranks) + its number there. Each at the place of its own number at first. `copy_slots`: on every rank,
  /// of each storage, for copies of other ranks' members (ExpertCopies). A copy has a weight and a gradient, nothing else:
  /// masters and state are at home. Whoever sets copies brings weights there and gradients home (ExpertCopier).
  PlacesId declare_places(std::int64_t members, std::int64_t copy_slots = 0);

  /// Before seal(). What this rank keeps of routed experts lives outside the device and comes when it is needed (ExpertTiers):
  /// states alone, or weights and gradients too. Those are in no bucket and have no place in all_grads(); where state is
  /// sharded each rank keeps that of an equal run of the members (of a storage's m members owner r of R: those from m r / R up
  /// to m (r + 1) / R). `options.groups` may be empty before seal_pretend().
  void offload_experts(ExpertTierOptions options);
  /// The groups of what is offloaded. Known after seal(). `state_kinds`: as ExpertTierOptions.
  std::vector<TierGroup> tier_groups(const std::vector<std::string>& state_kinds) const;
  /// Null when nothing is offloaded.
  ExpertTiers* tiers() const noexcept { return tiers_.get(); }
  /// Whether weights and gradients of a storage are offloaded; or masters and the optimizer's state.
  bool has_tiered_weights(StorageId id) const { return at(id).tiered_weights; }
  bool has_tiered_state(StorageId id) const { return at(id).tiered_state; }
  /// What a parameter has of a member of its storage, [rows, cols], in its own shape.
  TensorView box_of_member(const TensorView& member, ParamId id) const;

  /// Before seal(). Without it, and where a gradient is not summed over ranks, every rank keeps all state of what it holds.
  void shard_state(StateSharding sharding);
  /// Before seal(), for models that only run forward: what kernels read and no more. There are no masters beside weights, of
  /// offloaded experts no states, and initialize() leaves parameters to whoever loads them.
  void keep_weights_alone();
  bool keeps_weights_alone() const noexcept { return weights_alone_; }
  /// Allocates. `ever_trained` (one flag per parameter; empty = all): a storage all of whose parameters are never trained has no gradient (a mixed
  /// one is an error that names them).
  void seal(Device device, std::span<const char> ever_trained = {});
  /// The same on memory that is not there, for dry runs that find out what a run needs.
  void seal_pretend(Device device, std::span<const char> ever_trained = {});
  bool sealed() const noexcept { return sealed_; }
  bool is_pretend() const noexcept { return pretend_; }
  /// Memory like that of the store: on its device, and pretend when the store is.
  Buffer allocate(std::size_t bytes, const std::string& tag) const;
  /// What the store itself holds, by tag.
  std::vector<MemoryUse> memory_use() const;
  /// Fills all parameters by their Init and buffers with their initial values, on a stream of its own, and waits.
  /// `num_threads`: of the CPU backend.
  void initialize(std::uint64_t seed, int num_threads = 1);

  // --- kernels' side
  WeightLease acquire(StorageId id, Stream& stream) const;
  /// Whether a storage is trained now and has a gradient, wherever that is.
  bool has_gradient(StorageId id) const;
  /// Gradient of a storage (gradient type, accumulates); empty while frozen.
  TensorView grad(StorageId id) const;
  ConstTensorView slot_of_member(StorageId id) const;  ///< i32 [members]; not of offloaded weights
  /// Weights, or gradients, of a family for kernels: `work` is called for run after run, which together are the members that
  /// the visit is about; backward goes from the last to the first. One run where all are on the device.
  void weights_of_members(StorageId id,
                          const MemberVisit& visit,
                          Stream& stream,
                          const MemberWork& work) const;
  /// Not while frozen.
  void gradients_of_members(StorageId id,
                            const MemberVisit& visit,
                            Stream& stream,
                            const MemberWork& work) const;
  /// Whether visits should name the rows of each member where the host can know them: not all members are on the device.
  bool wants_member_rows() const noexcept { return run_limit_ > 0 || offloads_weights_; }
  /// Runs have at most so many members (0: any number), as they may where not all fit on the device. For tests.
  void limit_runs(std::int64_t members) { run_limit_ = members; }
  /// As Routing::place_of_expert: i32 [members of all ranks], empty while all are in order; with slots for copies [members of
  /// all ranks, turns], always.
  ConstTensorView place_of_member(PlacesId id) const { return at(id).on_device; }
  /// Members of a storage on this rank, and slots for copies behind them: what runs are about.
  std::int64_t places_here(StorageId id) const;
  TensorView buffer(BufferId id) const;

  // --- storages as a whole, for work that is the same for all their parameters
  std::size_t num_storages() const noexcept { return storages_.size(); }
  /// Parameters of a storage in the order of their rows; with members, each member holds all of them in turn.
  std::span<const ParamId> params_of(StorageId id) const { return at(id).params; }
  const Shape& storage_shape(StorageId id) const { return at(id).shape; }
  /// Views of what is offloaded do not exist: asking for them is an InternalError, here and below.
  TensorView storage_weight(StorageId id) const { return resident_weights(id).weight; }
  /// [slots for copies, rows, cols]; empty without, the gradient also where the storage is never trained.
  TensorView copied_weight(StorageId id) const { return at(id).copies.weight; }
  TensorView copied_gradient(StorageId id) const { return at(id).copies.grad; }
  /// Elements [begin, end) of a storage whose masters and optimizer state live on this rank; all of it unless sharded.
  const FlatRange& own_range(StorageId id) const { return at(id).own; }
  /// The same of the rank with this number among those that sum the storage's gradients.
  FlatRange range_of_owner(StorageId id, int owner) const;
  /// Of the own range; flat when that is not the whole.
  TensorView storage_master(StorageId id) const { return resident_master(id).master; }
  TensorView storage_remainder(StorageId id) const { return resident_master(id).remainder; }

  // --- the logical side; `member` counts those of this rank from 0 (0 for single tensors)
  std::span<const ParameterSpec> params() const noexcept { return params_; }
  const ParameterSpec& spec(ParamId id) const {
    return params_[static_cast<std::size_t>(id.index)];
  }
  std::span<const BufferSpec> buffers() const noexcept { return buffers_; }
  /// Members on this rank, 1 for single tensors, and the number that one has in the whole family.
  std::int64_t members_here(ParamId id) const { return place(id).members; }
  std::int64_t number_of(ParamId id, std::int64_t member) const;
  /// The numbers of all members here, i32 [members]; empty while they are a run.
  ConstTensorView numbers_here(ParamId id) const;
  /// Of every tensor of a storage here (a member's parameters in turn) its number among those of all ranks, i32; empty
  /// while they are a run.
  ConstTensorView tensor_numbers(StorageId id) const { return at(id).tensor_numbers; }
  std::span<const std::int32_t> places(PlacesId id) const { return at(id).of_member; }
  /// Another table, a permutation; what the members have (weights, state) must be moved by the caller. Enqueues, and waits
  /// for nothing: the stream must have passed an earlier call.
  void set_places(PlacesId id, std::span<const std::int32_t> places, Stream& stream);
  const ExpertCopies& copies(PlacesId id) const { return at(id).copies; }
  /// With slots for copies also after every set_places(), which leaves them empty. Waits for nothing, likewise.
  void set_copies(PlacesId id, ExpertCopies copies, Stream& stream);
  /// Storages whose members these are.
  std::vector<StorageId> storages_by(PlacesId id) const;
  /// What this rank holds of every member, in the coordinates of the whole member.
  const LocalBlock& block_of_member(ParamId id) const { return place(id).block; }
  bool holds_whole_members(ParamId id) const { return place(id).block.extent == spec(id).shape; }
  /// Whether this rank speaks for its block among all ranks that hold the same.
  bool speaks_for(ParamId id) const {
    return !spec(id).is_copy && moesaic::speaks_for(spec(id).placement, position_);
  }
  std::string member_name(ParamId id, std::int64_t member) const;
  /// The member's box as the 2-d (or the parameter's own) shape, contiguous: the copy that kernels read, the gradient.
  TensorView weight(ParamId id, std::int64_t member) const;
  TensorView gradient(ParamId id, std::int64_t member) const;
  /// Whether several ranks share this parameter's masters and optimizer state.
  bool is_sharded(ParamId id) const { return at(storage_of(id)).is_sharded; }
  /// What of a member this rank keeps state for: some of its rows, or all, or nothing.
  struct Piece {
    std::int64_t begin = 0, end = 0;  ///< elements of the storage
    LocalBlock block;                 ///< in the coordinates of the whole member
    bool is_empty() const noexcept { return begin == end; }
  };
  Piece own_piece(ParamId id, std::int64_t member) const;
  bool owns_whole(ParamId id, std::int64_t member) const {
    const Piece piece = own_piece(id, member);
    return !piece.is_empty() && piece.block.extent == block_of_member(id).extent;
  }
  /// Of the own piece, in its shape, empty when that is: the master that the optimizer updates (the weight itself when the
  /// types agree). A split master is weight and remainder (u16) together, and master() is empty; otherwise remainder() is.
  TensorView master(ParamId id, std::int64_t member) const;
  TensorView remainder(ParamId id, std::int64_t member) const;
  TensorView own_weight(ParamId id, std::int64_t member) const;
  TensorView own_gradient(ParamId id, std::int64_t member) const;  ///< also empty while frozen
  /// The own piece in any memory with the layout of the storage's own range (optimizer state).
  TensorView part_of(const TensorView& own, ParamId id, std::int64_t member) const;
  StorageId storage_of(ParamId id) const { return place(id).storage; }
  ParamId find(const std::string& name) const;  ///< by declared name; invalid when absent

  /// A frozen parameter has an empty gradient until it is released (train.phases).
  void set_frozen(ParamId id, bool frozen);
  bool frozen(ParamId id) const { return place(id).frozen; }
  bool ever_trained(ParamId id) const { return place(id).trained; }

  TensorView all_grads() const { return grads_; }  ///< one flat span
  /// The storage that the next declaration makes, before seal().
  StorageId next_storage() const noexcept { return {static_cast<std::int32_t>(storages_.size())}; }
  /// Gradients that are summed over the same ranks lie together, in declaration order; groups in the order of their first
  /// storages. Known after seal(). There is one group unless the layout treats some parameters differently.
  struct GradientGroup {
    std::vector<Axis> axes;                  ///< over which they are summed
    StoredAs stored_as = StoredAs::compute;  ///< of the weights, when state is sharded
    std::int64_t begin = 0, end = 0;         ///< elements of all_grads()
    bool may_shard = true;                   ///< see ParameterSpec::has_copy
  };
  std::span<const GradientGroup> gradient_groups() const noexcept { return gradient_groups_; }
  /// Where the gradients of a group's storages from `first` on begin in all_grads(), in elements.
  std::int64_t gradients_begin(std::size_t group, StorageId first) const;
  /// Gradients that are summed at once, and cut into a part for each rank of their group: rank p of it keeps the state of
  /// elements [bounds[p], bounds[p + 1]), counted from `begin`. Weights lie as gradients do. Groups in order, the buckets of
  /// each from its end; none without shard_state() or several ranks.
  struct Bucket {
    std::size_t group = 0;
    std::int64_t begin = 0, end = 0;  ///< elements of all_grads()
    std::vector<std::int64_t> bounds;
    TensorView weights;  ///< flat
  };
  std::span<const Bucket> buckets() const noexcept { return buckets_; }
  void zero_grads(Stream& stream) const;
  /// Whether master and weight are the same memory.
  bool masters_are_weights(ParamId id) const;
  const Precision& precision() const noexcept { return precision_; }
  Device device() const noexcept { return device_; }

 private:
  struct Storage {
    std::string name;
    Shape shape;  // of the whole storage
    std::int64_t members = 0, rows = 0, cols = 0;
    StoredAs stored_as = StoredAs::compute;
    DType dtype = DType::f32;
    TensorView weight, master, remainder, grad, slots;
    std::vector<ParamId> params;
    std::size_t gradient_group = 0;
    std::int64_t grad_begin = 0;  // elements of all gradients
    FlatRange own;
    bool is_sharded = false;
    bool tiered_weights = false, tiered_state = false;
    TensorView tensor_numbers;
    struct {
      TensorView weight, grad, slots;
    } copies;
  };
  struct Places {
    std::vector<std::int32_t> of_member;
    std::vector<std::int32_t> members_here;  // by number on this rank
    TensorView table, numbers, host;         // memory; host: of table, numbers and tensor numbers
    ConstTensorView on_device;               // the table, or nothing while in order; or the turns
    ExpertCopies copies;
    TensorView turns, turns_host;
  };
  struct Place {
    StorageId storage;
    std::int64_t first_row = 0;
    LocalBlock block;  // of a member
    std::int64_t members = 1, first_member = 0;
    bool frozen = false, trained = true;
  };
  const Place& place(ParamId id) const { return param_place_[static_cast<std::size_t>(id.index)]; }
  Place make_place(const ParameterSpec& spec) const;
  Places& at(PlacesId id) { return places_[static_cast<std::size_t>(id.index)]; }
  const Places& at(PlacesId id) const { return places_[static_cast<std::size_t>(id.index)]; }
  std::int64_t copy_slots(const Storage& storage) const;
  void allocate_copies();
  void initialize_copies(Stream& stream);
  std::int64_t table_elements(PlacesId id) const;
  void allocate_places();
  void in_runs(const Storage& storage,
               const TensorView& slots,
               const TensorView& copies,
               const MemberVisit& visit,
               const MemberWork& work) const;
  const Storage& resident_weights(StorageId id) const;
  const Storage& resident_master(StorageId id) const;
  void mark_tiers();
  void make_tiers();
  FlatRange tiered_range(const Storage& storage, int owner) const;
  void initialize_member(StorageId id, std::int64_t member, std::uint64_t seed, Backend& backend);
  InitialValues initial_values(ParamId id, std::int64_t member, std::uint64_t seed) const;
  std::size_t gradient_group_of(const Storage& storage);
  bool is_trained(const Storage& storage) const;
  void place_gradients();
  void deal_state();
  void deal_group(std::size_t group);
  void place_weights();
  void place_masters(Storage& storage, std::size_t at);
  std::size_t extra_master_bytes(const Storage& storage) const;
  TensorView piece_of(const TensorView& view, const Piece& piece, std::int64_t first) const;
  TensorView box(const TensorView& whole, ParamId id, std::int64_t member) const;
  Storage& at(StorageId id) { return storages_[static_cast<std::size_t>(id.index)]; }
  const Storage& at(StorageId id) const { return storages_[static_cast<std::size_t>(id.index)]; }

  Precision precision_;
  MeshPosition position_;
  Device device_;
  std::vector<ParameterSpec> params_;
  std::vector<Place> param_place_;
  std::unordered_map<std::string, std::int32_t> index_of_name_;
  std::vector<Storage> storages_;
  std::vector<BufferSpec> buffers_;
  std::vector<TensorView> buffer_views_;
  std::vector<Places> places_;
  Buffer weight_memory_, master_memory_, grad_memory_, slot_memory_, buffer_memory_;
  Buffer places_memory_, places_host_;
  Buffer copies_memory_, turns_memory_, turns_host_;
  TensorView grads_, copied_grads_;
  std::vector<GradientGroup> gradient_groups_;
  std::optional<StateSharding> sharding_;
  std::vector<Bucket> buckets_;
  bool sealed_ = false, pretend_ = false;
  std::int64_t run_limit_ = 0;
  bool offloads_weights_ = false, weights_alone_ = false;
  std::shared_ptr<const ExpertTierOptions> tier_options_;
  std::shared_ptr<ExpertTiers> tiers_;
};

}  // namespace moesaic
