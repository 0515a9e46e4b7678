#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace moesaic {

/// Dense layers see pp x dp x cp x tp, expert layers pp x edp x ep x etp, over the same ranks.
enum class Axis : std::uint8_t { pp, dp, cp, tp, edp, ep, etp };
constexpr int kNumAxes = 7;
const char* name(Axis axis) noexcept;

/// Degrees of parallelism (section `parallel` of the configuration). edp follows from dp·cp·tp =
/// edp·ep·etp. dp = 0 takes all ranks that the other axes leave.
struct MeshConfig {
  int pp = 1, dp = 0, cp = 1, tp = 1;
  int ep = 1, etp = 1;
};

/// Which rank sits where; no communication, so `plan` uses it for clusters that are not there.
///
/// world rank = ((pp·DP + dp)·CP + cp)·TP + tp = ((pp·EDP + edp)·EP + ep)·ETP + etp: tp and etp
/// neighbours are neighbours in rank, so they share a node; pp is outermost.
class MeshLayout {
 public:
  /// Throws UsageError with both products and the nearest legal values when they do not fit.
  MeshLayout(const MeshConfig& config, int world_size);

  int world_size() const noexcept { return world_size_; }
  int extent(Axis axis) const noexcept { return extents_[static_cast<std::size_t>(axis)]; }
  int coordinate(Axis axis, int world_rank) const;
  /// All ranks cut into groups along `axes`: the ranks of a group share every other coordinate of
  /// that family and are in world-rank order. Groups in the order of their first ranks. Throws
  /// InternalError for no axis, an axis named twice, or dense and expert axes in one list (pp is
  /// both).
  std::vector<std::vector<int>> groups(std::span<const Axis> axes) const;
  /// The group of groups(axes) that holds `world_rank`.
  std::vector<int> group_of(std::span<const Axis> axes, int world_rank) const;
  /// A line per axis: extent, groups. For the start of the log and `plan`.
  std::string table() const;

 private:
  int world_size_;
  std::array<int, kNumAxes> extents_{};
};

/// Where one rank sits in a layout: what decides which part of every tensor it holds. Without a layout it is alone.
class MeshPosition {
 public:
  MeshPosition() = default;
  MeshPosition(std::shared_ptr<const MeshLayout> layout, int world_rank)
      : layout_(std::move(layout)), rank_(world_rank) {}
  int world_rank() const noexcept { return rank_; }
  int world_size() const noexcept { return layout_ ? layout_->world_size() : 1; }
  int extent(Axis axis) const noexcept { return layout_ ? layout_->extent(axis) : 1; }
  int coordinate(Axis axis) const { return layout_ ? layout_->coordinate(axis, rank_) : 0; }
  /// Whether this rank is the first one of its pipeline stage.
  bool is_first_of_stage() const {
    return coordinate(Axis::dp) == 0 && coordinate(Axis::cp) == 0 && coordinate(Axis::tp) == 0;
  }
  /// Whether two lists of axes put this rank into groups of the same ranks.
  bool same_ranks(const std::vector<Axis>& a, const std::vector<Axis>& b) const;
  /// How many ranks the group along `axes` has, and which of them this one is.
  struct InGroup {
    int index = 0, size = 1;
  };
  InGroup in_group(const std::vector<Axis>& axes) const;

 private:
  std::shared_ptr<const MeshLayout> layout_;
  int rank_ = 0;
};

/// This rank's group along some axes.
class ProcessGroup {
 public:
  ProcessGroup(std::vector<int> world_ranks, int rank, Communicator* comm)
      : world_ranks_(std::move(world_ranks)), rank_(rank), comm_(comm) {}
  int rank() const noexcept { return rank_; }  ///< position in the group
  int size() const noexcept { return static_cast<int>(world_ranks_.size()); }
  std::span<const int> world_ranks() const noexcept { return world_ranks_; }
  /// Null for a group of one rank: such communicators are never made (NCCL spends 512 MiB on one),
  /// and there is nothing to communicate. Owned by the Mesh.
  Communicator* comm() const noexcept { return comm_; }

 private:
  std::vector<int> world_ranks_;
  int rank_;
  Communicator* comm_;
};

/// A layout with its communicators. Groups of equal members share one; a group of all ranks is the
/// world's own. Made for every single axis, {dp, cp} (losses, dense gradients), {cp, tp} (who share
/// a micro-batch), {dp, cp, tp} (a stage), and what `more_groups` lists; all ranks must construct it alike.
class Mesh {
 public:
  using AxisList = std::vector<Axis>;
  /// `world` must outlive the mesh. Throws UsageError as MeshLayout does.
  Mesh(const MeshConfig& config,
       Communicator& world,
       const std::vector<AxisList>& more_groups = {});
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  const MeshLayout& layout() const noexcept;
  MeshPosition position() const;
  Communicator& world() const noexcept;
  int rank() const noexcept;  ///< in the world
  int extent(Axis axis) const noexcept { return layout().extent(axis); }
  int coordinate(Axis axis) const { return layout().coordinate(axis, rank()); }
  const ProcessGroup& group(Axis axis) const { return group(AxisList{axis}); }
  /// Throws InternalError for a list that was not made (the order of axes does not matter).
  const ProcessGroup& group(const AxisList& axes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
