#include "core/nn/parameter_store.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/base/random.h"
#include "core/nn/expert_tiers.h"
#include "kernels/backend.h"
#include "kernels/ops/elementwise.h"

namespace moesaic {
namespace {

constexpr std::size_t kAlign = 64;
std::size_t aligned(std::size_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

const char* name(Part part) noexcept {
  switch (part) {
    case Part::embedding:
      return "embedding";
    case Part::head:
      return "head";
    case Part::norm:
      return "norms";
    case Part::kda:
      return "KDA";
    case Part::mla:
      return "MLA";
    case Part::indexer:
      return "indexer";
    case Part::dense_mlp:
      return "dense MLP";
    case Part::router:
      return "router";
    case Part::latent:
      return "latent projections";
    case Part::shared_expert:
      return "shared experts";
    case Part::routed_expert:
      return "routed experts";
    case Part::attn_res:
      return "attention residuals";
    case Part::mtp:
      return "MTP";
  }
  return "?";
}

std::string BufferSpec::checkpoint_name() const {
  if (is_parameter_in_checkpoint) return name;
  return (is_optional ? "buffer/optional/" : "buffer/") + name;
}

StorageId ParameterStore::declare_storage(const std::string& storage_name,
                                          std::int64_t members,
                                          std::int64_t rows,
                                          std::int64_t cols,
                                          StoredAs stored_as) {
  MOESAIC_CHECK(!sealed_, "declarations come before seal()");
  Storage s;
  s.name = storage_name;
  s.members = members;
  s.rows = rows;
  s.cols = cols;
  s.shape = members > 0 ? Shape{members, rows, cols} : Shape{rows, cols};
  s.stored_as = stored_as;
  s.dtype = stored_as == StoredAs::compute ? precision_.compute : precision_.stats;
  storages_.push_back(s);
  return {static_cast<std::int32_t>(storages_.size() - 1)};
}

ParamId ParameterStore::declare(ParameterSpec spec, StorageId storage, std::int64_t first_row) {
  MOESAIC_CHECK(!sealed_, "declarations come before seal()");
  MOESAIC_CHECK(!find(spec.name).valid(), "parameter '" + spec.name + "' is declared twice");
  Storage& s = at(storage);
  Place place = make_place(spec);
  place.storage = storage;
  place.first_row = first_row;
  MOESAIC_CHECK(
      (spec.members > 0 ? place.members : 0) == s.members && spec.stored_as == s.stored_as,
      "'" + spec.name + "' does not fit its storage");
  const std::int64_t n = place.block.extent.numel(), rows = n / s.cols;
  MOESAIC_CHECK(rows * s.cols == n && first_row + rows <= s.rows,
                "'" + spec.name + "' lies outside its storage");
  const ParamId id{static_cast<std::int32_t>(params_.size())};
  s.params.push_back(id);
  index_of_name_[spec.name] = id.index;
  params_.push_back(std::move(spec));
  param_place_.push_back(std::move(place));
  return id;
}

StorageId ParameterStore::declare(ParameterSpec spec) {
  const Place place = make_place(spec);
  const Shape& shape = place.block.extent;
  const std::int64_t cols = shape.rank == 0 ? 1 : shape[shape.rank - 1];
  const std::int64_t rows = cols == 0 ? 0 : shape.numel() / cols;
  const StorageId id =
      declare_storage(spec.name, spec.members > 0 ? place.members : 0, rows, cols, spec.stored_as);
  if (spec.members == 0) at(id).shape = shape;  // vectors stay vectors
  declare(std::move(spec), id, 0);
  return id;
}

// This rank's members and its block of each.
ParameterStore::Place ParameterStore::make_place(const ParameterSpec& spec) const {
  Place place;
  const bool family = spec.members > 0;
  Shape stored;
  if (family) stored.dim[static_cast<std::size_t>(stored.rank++)] = spec.members;
  for (int d = 0; d < spec.shape.rank; ++d)
    stored.dim[static_cast<std::size_t>(stored.rank++)] = spec.shape[d];
  const LocalBlock block = local_block(spec.name, stored, spec.placement, position_);
  if (family) {
    place.members = block.extent[0];
    place.first_member = block.offset[0];
    if (spec.places.valid()) {
      MOESAIC_CHECK(
          at(spec.places).members_here.size() == static_cast<std::size_t>(place.members) &&
              at(spec.places).of_member.size() == static_cast<std::size_t>(spec.members),
          "the members of '" + spec.name + "' are not where its table says");
    }
  }
  const int first = family ? 1 : 0;
  place.block.extent.rank = place.block.offset.rank = spec.shape.rank;
  for (int d = 0; d < spec.shape.rank; ++d) {
    place.block.extent.dim[static_cast<std::size_t>(d)] = block.extent[d + first];
    place.block.offset.dim[static_cast<std::size_t>(d)] = block.offset[d + first];
  }
  return place;
}

BufferId ParameterStore::declare_buffer(BufferSpec spec) {
  MOESAIC_CHECK(!sealed_, "declarations come before seal()");
  buffers_.push_back(std::move(spec));
  return {static_cast<std::int32_t>(buffers_.size() - 1)};
}

void ParameterStore::seal_pretend(Device device, std::span<const char> ever_trained) {
  pretend_ = true;
  seal(device, ever_trained);
}

Buffer ParameterStore::allocate(std::size_t bytes, const std::string& tag) const {
  return pretend_ ? Buffer::pretend(bytes, device_) : Buffer(bytes, device_, tag);
}

std::vector<MemoryUse> ParameterStore::memory_use() const {
  std::vector<MemoryUse> use{{"weights", weight_memory_.bytes()},
                             {"master weights", master_memory_.bytes()},
                             {"gradients", grad_memory_.bytes()},
                             {"expert slots", slot_memory_.bytes() + places_memory_.bytes()},
                             {"expert replicas", copies_memory_.bytes() + turns_memory_.bytes()},
                             {"persistent buffers", buffer_memory_.bytes()}};
  if (tiers_ != nullptr) {
    const std::vector<MemoryUse> tiered = tiers_->device_use();
    use.insert(use.end(), tiered.begin(), tiered.end());
  }
  return use;
}

std::int64_t ParameterStore::gradients_begin(std::size_t group, StorageId first) const {
  for (auto i = static_cast<std::size_t>(first.index); i < storages_.size(); ++i) {
    const TensorView& grad = storages_[i].grad;
    if (!grad.empty() && storages_[i].gradient_group == group)
      return (grad.data() - grads_.data()) / static_cast<std::int64_t>(byte_size(grads_.dtype()));
  }
  return gradient_groups_[group].end;
}

// The group of the ranks that a storage's gradients are summed over, made when it is new. Axes that come to the same ranks
// are one group: without expert parallelism experts are reduced like everything else.
std::size_t ParameterStore::gradient_group_of(const Storage& storage) {
  const std::vector<Axis> axes = spec(storage.params.front()).placement.gradient_axes();
  for (const ParamId p : storage.params)
    MOESAIC_CHECK(spec(p).placement.gradient_axes() == axes,
                  "the gradients of '" + storage.name + "' are not summed over the same ranks");
  const bool may_shard = !spec(storage.params.front()).has_copy;
  const auto weight_dtype = [&](StoredAs as) {
    return as == StoredAs::compute ? precision_.compute : precision_.stats;
  };
  for (std::size_t g = 0; g < gradient_groups_.size(); ++g) {
    const GradientGroup& group = gradient_groups_[g];
    // Weights of one bucket are gathered as one tensor.
    if (sharding_ &&
        (weight_dtype(group.stored_as) != storage.dtype || group.may_shard != may_shard))
      continue;
    if (position_.same_ranks(group.axes, axes)) return g;
  }
  gradient_groups_.push_back({axes, storage.stored_as, 0, 0, may_shard});
  return gradient_groups_.size() - 1;
}

// All parameters of a storage are trained in some phase, or none.
bool ParameterStore::is_trained(const Storage& storage) const {
  const auto trained = std::count_if(
      storage.params.begin(), storage.params.end(), [&](ParamId p) { return place(p).trained; });
  if (trained != 0 && trained != static_cast<std::ptrdiff_t>(storage.params.size())) {
    throw UsageError(
        fmt::format("'{}' holds parameters that are frozen and parameters that are not; freeze "
                    "all of them or none",
                    storage.name));
  }
  return trained != 0;
}

void ParameterStore::place_gradients() {
  std::vector<std::size_t> trained;
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    if (!is_trained(storages_[i]) || storages_[i].tiered_weights) continue;
    storages_[i].gradient_group = gradient_group_of(storages_[i]);
    trained.push_back(i);
  }
  const auto elements = [&](std::size_t i) {
    return static_cast<std::int64_t>(aligned(static_cast<std::size_t>(storages_[i].shape.numel())));
  };
  std::int64_t all = 0;
  for (const std::size_t i : trained)
    all += elements(i);
  grad_memory_ = allocate(byte_size(precision_.grad) * static_cast<std::size_t>(all), "gradients");
  grads_ = grad_memory_.view({all}, precision_.grad);
  std::int64_t at = 0;
  for (std::size_t g = 0; g < gradient_groups_.size(); ++g) {
    gradient_groups_[g].begin = at;
    for (const std::size_t i : trained) {
      if (storages_[i].gradient_group != g) continue;
      storages_[i].grad =
          grad_memory_.view(storages_[i].shape,
                            precision_.grad,
                            static_cast<std::size_t>(at) * byte_size(precision_.grad));
      storages_[i].grad_begin = at;
      at += elements(i);
    }
    gradient_groups_[g].end = at;
  }
}

// Beside the weight.
std::size_t ParameterStore::extra_master_bytes(const Storage& storage) const {
  if (storage.dtype == precision_.master || storage.tiered_state || weights_alone_) return 0;
  return byte_size(precision_.split_masters ? DType::u16 : precision_.master) *
         static_cast<std::size_t>(storage.own.end - storage.own.begin);
}

void ParameterStore::seal(Device device, std::span<const char> ever_trained) {
  MOESAIC_CHECK(!sealed_, "sealed twice");
  MOESAIC_CHECK(!precision_.split_masters ||
                    (precision_.compute == DType::bf16 && precision_.master == DType::f32),
                "only f32 masters of bf16 weights can be split");
  MOESAIC_CHECK(ever_trained.empty() || ever_trained.size() == params_.size(),
                "one flag per parameter");
  device_ = device;
  for (std::size_t i = 0; i < ever_trained.size(); ++i) {
    param_place_[i].trained = ever_trained[i] != 0;
    param_place_[i].frozen = ever_trained[i] == 0;
  }
  mark_tiers();
  place_gradients();
  deal_state();
  place_weights();
  std::size_t master_bytes = 0, slot_bytes = 0;
  for (const auto& s : storages_) {
    master_bytes += aligned(extra_master_bytes(s));
    if (!s.tiered_weights) slot_bytes += aligned(4 * static_cast<std::size_t>(s.members));
  }
  if (master_bytes > 0) master_memory_ = allocate(master_bytes, "master weights");
  if (slot_bytes > 0) slot_memory_ = allocate(slot_bytes, "expert slots");

  std::size_t m = 0, t = 0;
  for (auto& s : storages_) {
    place_masters(s, m);
    m += aligned(extra_master_bytes(s));
    if (s.members > 0 && !s.tiered_weights) {
      s.slots = slot_memory_.view({s.members}, DType::i32, t);
      t += aligned(4 * static_cast<std::size_t>(s.members));
    }
  }

  allocate_places();
  allocate_copies();

  std::size_t buffer_bytes = 0;
  for (const auto& b : buffers_)
    buffer_bytes += aligned(byte_size(b.dtype) * static_cast<std::size_t>(b.shape.numel()));
  if (buffer_bytes > 0) buffer_memory_ = allocate(buffer_bytes, "persistent buffers");
  std::size_t offset = 0;
  for (const auto& b : buffers_) {
    buffer_views_.push_back(buffer_memory_.view(b.shape, b.dtype, offset));
    offset += aligned(byte_size(b.dtype) * static_cast<std::size_t>(b.shape.numel()));
  }
  sealed_ = true;
  make_tiers();
}

// Without where they go.
InitialValues ParameterStore::initial_values(ParamId id,
                                             std::int64_t member,
                                             std::uint64_t seed) const {
  const ParameterSpec& spec = params_[static_cast<std::size_t>(id.index)];
  return {.kind = spec.init.kind,
          .a = spec.init.a,
          .b = spec.init.b,
          .key = mix64(seed ^ hash_name(member_name(id, member))),
          .whole = spec.shape,
          .begin = place(id).block.offset};
}

void ParameterStore::initialize(std::uint64_t seed, int num_threads) {
  MOESAIC_CHECK(sealed_, "initialize() comes after seal()");
  BackendOwner owner({.device = device_,
                      .mode = Stream::Mode::immediate,
                      .num_threads = num_threads,
                      .name = "initial values"});
  Backend& backend = owner.backend();
  for (std::size_t i = 0; !weights_alone_ && i < params_.size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    if (has_tiered_state(storage_of(id))) continue;
    for (std::int64_t e = 0; e < members_here(id); ++e) {
      InitialValues values = initial_values(id, e, seed);
      values.y = weight(id, e);
      if (!owns_whole(id, e)) run(backend, values);
      const Piece piece = own_piece(id, e);
      if (piece.is_empty()) continue;
      values.y = own_weight(id, e);
      values.copy = masters_are_weights(id) ? TensorView() : master(id, e);
      values.remainder = remainder(id, e);
      values.begin = piece.block.offset;
      run(backend, values);
    }
  }
  for (std::size_t i = 0; !weights_alone_ && i < storages_.size(); ++i) {
    for (std::int64_t e = 0; storages_[i].tiered_state && e < storages_[i].members; ++e)
      initialize_member({static_cast<std::int32_t>(i)}, e, seed, backend);
  }
  Stream& stream = stream_of(backend);
  for (auto& s : storages_) {
    if (s.slots.empty()) continue;
    const Buffer staging(s.slots.bytes(), kCpu, "initial values");
    const TensorView host = staging.view(s.slots.shape(), DType::i32);
    for (std::int64_t e = 0; e < s.members; ++e)
      host.as<std::int32_t>()[e] = static_cast<std::int32_t>(e);
    copy_tensor(s.slots, host, stream);
    stream.synchronize();
  }
  initialize_copies(stream);
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i].initial == 0) {
      zero_tensor(buffer_views_[i], stream);
    } else {
      run(backend, Fill{.y = buffer_views_[i], .value = buffers_[i].initial});
    }
  }
  stream.synchronize();
}

WeightLease ParameterStore::acquire(StorageId id, Stream&) const {
  return WeightLease(resident_weights(id).weight);
}

bool ParameterStore::has_gradient(StorageId id) const {
  const Storage& s = at(id);
  return !s.params.empty() && !frozen(s.params.front()) && place(s.params.front()).trained;
}

TensorView ParameterStore::grad(StorageId id) const {
  const Storage& s = at(id);
  if (!s.params.empty() && frozen(s.params.front())) return {};
  return resident_weights(id).grad;
}

ConstTensorView ParameterStore::slot_of_member(StorageId id) const {
  return resident_weights(id).slots;
}

// Runs of members that have rows, all in their slots.
void ParameterStore::in_runs(const Storage& s,
                             const TensorView& slots,
                             const TensorView& copies,
                             const MemberVisit& visit,
                             const MemberWork& work) const {
  std::vector<MemberRun> runs;
  if (run_limit_ == 0) runs.push_back({0, s.members, slots, s.slots});
  for (std::int64_t m = 0; run_limit_ > 0 && m < s.members; ++m) {
    if (!visit.rows.empty() && visit.rows[static_cast<std::size_t>(m)] == 0) continue;
    if (runs.empty() || runs.back().end != m || m - runs.back().begin == run_limit_)
      runs.push_back({m, m, slots, {}});
    runs.back().end = m + 1;
    runs.back().slot_of_member = s.slots.rows(runs.back().begin, m + 1);
  }
  if (!copies.empty())
    runs.push_back({s.members, s.members + copies.dim(0), copies, s.copies.slots});
  if (visit.kind == tiers::VisitKind::backward) std::reverse(runs.begin(), runs.end());
  for (const MemberRun& run : runs)
    work(run);
}

void ParameterStore::weights_of_members(StorageId id,
                                        const MemberVisit& visit,
                                        Stream& stream,
                                        const MemberWork& work) const {
  if (has_tiered_weights(id)) return tiers_->weights(id, visit, stream, work);
  in_runs(at(id), at(id).weight, at(id).copies.weight, visit, work);
}

void ParameterStore::gradients_of_members(StorageId id,
                                          const MemberVisit& visit,
                                          Stream& stream,
                                          const MemberWork& work) const {
  MOESAIC_CHECK(has_gradient(id), "'" + at(id).name + "' has no gradient");
  if (has_tiered_weights(id)) return tiers_->gradients(id, visit, stream, work);
  in_runs(at(id), at(id).grad, at(id).copies.grad, visit, work);
}

TensorView ParameterStore::buffer(BufferId id) const {
  return buffer_views_[static_cast<std::size_t>(id.index)];
}

std::string ParameterStore::member_name(ParamId id, std::int64_t member) const {
  const ParameterSpec& spec = params_[static_cast<std::size_t>(id.index)];
  if (spec.members == 0) return spec.name;
  std::string n = spec.name;
  const auto at_brace = n.find("{}");
  MOESAIC_CHECK(at_brace != std::string::npos, "a family's name holds {}");
  return n.replace(at_brace, 2, std::to_string(number_of(id, member)));
}

TensorView ParameterStore::box(const TensorView& whole, ParamId id, std::int64_t member) const {
  if (whole.empty()) return {};
  const Storage& s = at(storage_of(id));
  const Shape& shape = place(id).block.extent;
  const std::int64_t rows = shape.numel() / std::max<std::int64_t>(1, s.cols);
  const std::int64_t all_rows = std::max<std::int64_t>(1, s.members) * s.rows;
  const TensorView flat = whole.reshaped({all_rows, s.cols});
  const std::int64_t begin = member * s.rows + place(id).first_row;
  return flat.rows(begin, begin + rows).reshaped(shape);
}

TensorView ParameterStore::weight(ParamId id, std::int64_t member) const {
  return box(resident_weights(storage_of(id)).weight, id, member);
}
TensorView ParameterStore::gradient(ParamId id, std::int64_t member) const {
  return frozen(id) ? TensorView() : box(resident_weights(storage_of(id)).grad, id, member);
}

ParamId ParameterStore::find(const std::string& wanted) const {
  const auto it = index_of_name_.find(wanted);
  return it == index_of_name_.end() ? ParamId{} : ParamId{it->second};
}

void ParameterStore::set_frozen(ParamId id, bool is_frozen) {
  Place& place = param_place_[static_cast<std::size_t>(id.index)];
  MOESAIC_CHECK(is_frozen || place.trained, "a parameter without a gradient cannot be released");
  place.frozen = is_frozen;
}

void ParameterStore::zero_grads(Stream& stream) const {
  if (grads_.numel() > 0) zero_tensor(grads_, stream);
  if (!copied_grads_.empty()) zero_tensor(copied_grads_, stream);
}

bool ParameterStore::masters_are_weights(ParamId id) const {
  return at(storage_of(id)).dtype == precision_.master;
}

}  // namespace moesaic
