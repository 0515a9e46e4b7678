// Which rank keeps the state of which elements, and where weights and masters lie.
#include <algorithm>

#include "core/nn/parameter_store.h"
#include "core/nn/row_blocks.h"

namespace moesaic {
namespace {

constexpr std::size_t kAlign = 64;  // bytes; elements where weights lie as gradients do
std::size_t aligned(std::size_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

// What each rank should get of `n` more bytes so that the totals come as close together as they can.
std::vector<double> fair_shares(const std::vector<std::int64_t>& loads, std::int64_t n) {
  std::vector<std::int64_t> sorted = loads;
  std::sort(sorted.begin(), sorted.end());
  double level = 0;
  auto below = static_cast<double>(n);
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    below += static_cast<double>(sorted[i]);
    level = below / static_cast<double>(i + 1);
    if (i + 1 == sorted.size() || level <= static_cast<double>(sorted[i + 1])) break;
  }
  std::vector<double> shares;
  for (const std::int64_t load : loads)
    shares.push_back(std::max(0.0, level - static_cast<double>(load)));
  return shares;
}

// A place where state may be cut.
struct Cut {
  std::int64_t element = 0;
  std::int64_t bytes_each = 0;  // of state, of the elements up to the next cut
  std::int64_t before = 0;      // bytes of state from the first cut to this one
  bool operator<(const Cut& other) const { return element < other.element; }
};

const Cut& nearest(const std::vector<Cut>& sorted, double bytes) {
  const auto above =
      std::lower_bound(sorted.begin(), sorted.end(), bytes, [](const Cut& cut, double value) {
        return static_cast<double>(cut.before) < value;
      });
  if (above == sorted.end()) return sorted.back();
  if (above == sorted.begin()) return *above;
  const auto below = std::prev(above);
  return bytes - static_cast<double>(below->before) <= static_cast<double>(above->before) - bytes
             ? *below
             : *above;
}

// Where the parts of the ranks begin and end, counted from the first cut. `loads`: bytes that each rank has so far.
std::vector<std::int64_t> deal(std::vector<Cut>& cuts, std::vector<std::int64_t>& loads) {
  std::sort(cuts.begin(), cuts.end());
  for (std::size_t c = 1; c < cuts.size(); ++c) {
    const Cut& last = cuts[c - 1];
    cuts[c].before = last.before + last.bytes_each * (cuts[c].element - last.element);
  }
  std::vector<std::int64_t> bounds{0};
  double wanted = 0;
  std::int64_t dealt = 0;
  const std::vector<double> shares = fair_shares(loads, cuts.back().before);
  for (std::size_t p = 0; p < loads.size(); ++p) {
    wanted += shares[p];
    const Cut& bound = p + 1 == loads.size() ? cuts.back() : nearest(cuts, wanted);
    loads[p] += bound.before - dealt;
    dealt = bound.before;
    bounds.push_back(bound.element - cuts.front().element);
  }
  return bounds;
}

}  // namespace

void ParameterStore::shard_state(StateSharding sharding) {
  MOESAIC_CHECK(!sealed_, "sharding comes before seal()");
  MOESAIC_CHECK(sharding.bucket_bytes > 0, "buckets hold something");
  sharding_ = std::move(sharding);
}

void ParameterStore::keep_weights_alone() {
  MOESAIC_CHECK(!sealed_, "what is kept is said before seal()");
  weights_alone_ = true;
}

void ParameterStore::deal_state() {
  for (Storage& s : storages_)
    s.own = {0, s.shape.numel()};
  for (std::size_t g = 0; g < gradient_groups_.size(); ++g) {
    const GradientGroup& group = gradient_groups_[g];
    if (sharding_ && group.may_shard && position_.in_group(group.axes).size > 1) deal_group(g);
  }
  for (Storage& s : storages_) {
    if (!s.tiered_weights || s.params.empty()) continue;
    const MeshPosition::InGroup group =
        position_.in_group(spec(s.params.front()).placement.gradient_axes());
    s.is_sharded = sharding_ && group.size > 1 && is_trained(s) && !spec(s.params.front()).has_copy;
    s.own = tiered_range(s, group.index);
  }
}

// Members in equal runs.
FlatRange ParameterStore::tiered_range(const Storage& s, int owner) const {
  if (!s.is_sharded) return {0, s.shape.numel()};
  const std::int64_t owners =
      position_.in_group(spec(s.params.front()).placement.gradient_axes()).size;
  const std::int64_t each = s.rows * s.cols;
  return {s.members * owner / owners * each, s.members * (owner + 1) / owners * each};
}

void ParameterStore::deal_group(std::size_t group) {
  std::vector<std::size_t> storages;
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    if (!storages_[i].grad.empty() && storages_[i].gradient_group == group) storages.push_back(i);
  }
  // Storages that must stay in one piece with the one before.
  std::vector<char> joined(storages_.size() + 1, 0), uncut(storages_.size() + 1, 0);
  for (const auto& [a, b] : sharding_->together) {
    const ParamId first = find(a), second = find(b);
    MOESAIC_CHECK(first.valid() && second.valid(), "no parameters '" + a + "' and '" + b + "'");
    const std::int32_t low = std::min(storage_of(first).index, storage_of(second).index),
                       high = std::max(storage_of(first).index, storage_of(second).index);
    for (std::int32_t i = low; i <= high; ++i) {
      const auto s = static_cast<std::size_t>(i);
      joined[s] = joined[s] != 0 || i > low ? 1 : 0;
      uncut[s] = 1;
    }
  }
  const auto state_bytes = [&](const Storage& s, bool is_matrix) {
    const std::size_t master = byte_size(precision_.master);
    const std::size_t beside = s.dtype == precision_.master ? 0 : master;
    return static_cast<std::int64_t>(beside + (is_matrix ? master : 2 * master));
  };
  const auto add_cuts = [&](const Storage& s, std::vector<Cut>& cuts) {
    for (std::int64_t e = 0; e < std::max<std::int64_t>(1, s.members); ++e) {
      // Whole members: each has a partial of the norm, and a record of its own where they are offloaded.
      if (s.members > 0) {
        const bool is_matrix = sharding_->whole_matrices && spec(s.params.front()).matrix;
        cuts.push_back({s.grad_begin + e * s.rows * s.cols, state_bytes(s, is_matrix)});
        continue;
      }
      for (const ParamId id : s.params) {
        const Shape& extent = place(id).block.extent;
        const std::int64_t begin = s.grad_begin + (e * s.rows + place(id).first_row) * s.cols;
        const bool is_matrix = sharding_->whole_matrices && spec(id).matrix;
        const RowBlocks blocks(extent);
        for (std::int64_t b = 0; b < (is_matrix ? 1 : blocks.count); ++b)
          cuts.push_back({begin + b * blocks.elements, state_bytes(s, is_matrix)});
      }
    }
  };
  const auto [me, size] = position_.in_group(gradient_groups_[group].axes);
  std::vector<std::int64_t> loads(static_cast<std::size_t>(size), 0);
  std::int64_t end = gradient_groups_[group].end;
  std::vector<Cut> cuts;
  for (std::size_t k = storages.size(); k-- > 0;) {
    const Storage& s = storages_[storages[k]];
    if (uncut[storages[k]] == 0) {
      add_cuts(s, cuts);
    } else if (joined[storages[k]] == 0) {
      cuts.push_back({s.grad_begin, state_bytes(s, sharding_->whole_matrices)});
    }
    const std::int64_t bytes =
        (end - s.grad_begin) * static_cast<std::int64_t>(byte_size(precision_.grad));
    if (k > 0 && (bytes < sharding_->bucket_bytes || joined[storages[k]] != 0)) continue;
    Bucket bucket{group, s.grad_begin, end, {}, {}};
    cuts.push_back({end});
    bucket.bounds = deal(cuts, loads);
    buckets_.push_back(std::move(bucket));
    for (const std::size_t i : storages) {
      Storage& t = storages_[i];
      if (t.grad_begin < s.grad_begin || t.grad_begin >= end) continue;
      t.is_sharded = true;
      t.own = range_of_owner({static_cast<std::int32_t>(i)}, me);
    }
    end = s.grad_begin;
    cuts.clear();
  }
}

FlatRange ParameterStore::range_of_owner(StorageId id, int owner) const {
  const Storage& s = at(id);
  if (s.tiered_weights) return tiered_range(s, owner);
  const std::int64_t n = s.shape.numel();
  for (const Bucket& bucket : buckets_) {
    if (!s.is_sharded || bucket.group != s.gradient_group || s.grad_begin < bucket.begin ||
        s.grad_begin >= bucket.end)
      continue;
    const std::int64_t* bound = &bucket.bounds.at(static_cast<std::size_t>(owner));
    return {std::clamp<std::int64_t>(bucket.begin + bound[0] - s.grad_begin, 0, n),
            std::clamp<std::int64_t>(bucket.begin + bound[1] - s.grad_begin, 0, n)};
  }
  return {0, n};
}

// In the order of declaration; where state is sharded as gradients lie, group by group.
void ParameterStore::place_weights() {
  std::vector<std::size_t> at(storages_.size());
  std::vector<std::size_t> group_at(gradient_groups_.size());
  std::size_t bytes = 0;
  if (!buckets_.empty()) {
    for (std::size_t g = 0; g < gradient_groups_.size(); ++g) {
      const GradientGroup& group = gradient_groups_[g];
      group_at[g] = bytes;
      bytes +=
          static_cast<std::size_t>(group.end - group.begin) *
          byte_size(group.stored_as == StoredAs::compute ? precision_.compute : precision_.stats);
    }
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const Storage& s = storages_[i];
    if (!buckets_.empty() && !s.grad.empty()) {
      at[i] = group_at[s.gradient_group] +
              static_cast<std::size_t>(s.grad_begin - gradient_groups_[s.gradient_group].begin) *
                  byte_size(s.dtype);
    } else if (!s.tiered_weights) {
      at[i] = bytes;
      bytes += aligned(byte_size(s.dtype) * static_cast<std::size_t>(s.shape.numel()));
    }
  }
  weight_memory_ = allocate(bytes, "weights");
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    if (storages_[i].tiered_weights) continue;
    storages_[i].weight = weight_memory_.view(storages_[i].shape, storages_[i].dtype, at[i]);
  }
  for (Bucket& bucket : buckets_) {
    const GradientGroup& group = gradient_groups_[bucket.group];
    const DType dtype =
        group.stored_as == StoredAs::compute ? precision_.compute : precision_.stats;
    bucket.weights = weight_memory_.view(
        {bucket.end - bucket.begin},
        dtype,
        group_at[bucket.group] +
            static_cast<std::size_t>(bucket.begin - group.begin) * byte_size(dtype));
  }
}

// `at`: bytes in the memory of the masters that are not weights.
void ParameterStore::place_masters(Storage& s, std::size_t at) {
  const std::int64_t n = s.own.end - s.own.begin;
  if (n == 0 || s.tiered_weights) return;
  if (s.dtype != precision_.master && (s.tiered_state || weights_alone_)) return;
  const bool is_whole = n == s.shape.numel();
  const Shape shape = is_whole ? s.shape : Shape{n};
  if (s.dtype == precision_.master) {
    s.master =
        is_whole ? s.weight : s.weight.reshaped({s.shape.numel()}).rows(s.own.begin, s.own.end);
  } else if (precision_.split_masters) {
    s.remainder = master_memory_.view(shape, DType::u16, at);
  } else {
    s.master = master_memory_.view(shape, precision_.master, at);
  }
}

ParameterStore::Piece ParameterStore::own_piece(ParamId id, std::int64_t member) const {
  const Storage& s = at(storage_of(id));
  const LocalBlock& block = place(id).block;
  const std::int64_t begin = (member * s.rows + place(id).first_row) * s.cols,
                     end = begin + block.extent.numel();
  Piece piece{std::max(begin, s.own.begin), std::min(end, s.own.end), block};
  if (piece.begin >= piece.end) return {};
  if (piece.begin == begin && piece.end == end) return piece;
  const std::int64_t row = block.extent.numel() / block.extent[0];
  MOESAIC_CHECK((piece.begin - begin) % row == 0 && (piece.end - piece.begin) % row == 0,
                "'" + s.name + "' is cut inside a row");
  piece.block.offset.dim[0] += (piece.begin - begin) / row;
  piece.block.extent.dim[0] = (piece.end - piece.begin) / row;
  return piece;
}

TensorView ParameterStore::piece_of(const TensorView& view,
                                    const Piece& piece,
                                    std::int64_t first) const {
  if (view.empty() || piece.is_empty()) return {};
  return view.reshaped({view.numel()})
      .rows(piece.begin - first, piece.end - first)
      .reshaped(piece.block.extent);
}

TensorView ParameterStore::part_of(const TensorView& own, ParamId id, std::int64_t member) const {
  return piece_of(own, own_piece(id, member), at(storage_of(id)).own.begin);
}
TensorView ParameterStore::master(ParamId id, std::int64_t member) const {
  return part_of(resident_master(storage_of(id)).master, id, member);
}
TensorView ParameterStore::remainder(ParamId id, std::int64_t member) const {
  return part_of(resident_master(storage_of(id)).remainder, id, member);
}
TensorView ParameterStore::own_weight(ParamId id, std::int64_t member) const {
  return piece_of(resident_weights(storage_of(id)).weight, own_piece(id, member), 0);
}
TensorView ParameterStore::own_gradient(ParamId id, std::int64_t member) const {
  if (frozen(id)) return {};
  return piece_of(resident_weights(storage_of(id)).grad, own_piece(id, member), 0);
}

}  // namespace moesaic
