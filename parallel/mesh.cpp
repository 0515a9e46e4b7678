#include "parallel/mesh.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

namespace moesaic {
namespace {

using Family = std::array<Axis, 4>;
constexpr Family kDense{Axis::pp, Axis::dp, Axis::cp, Axis::tp};
constexpr Family kExpert{Axis::pp, Axis::edp, Axis::ep, Axis::etp};

bool is_in(const Family& family, Axis axis) {
  return std::find(family.begin(), family.end(), axis) != family.end();
}

void check_degrees(const MeshConfig& c) {
  const std::pair<const char*, int> degrees[] = {
      {"pp", c.pp}, {"cp", c.cp}, {"tp", c.tp}, {"ep", c.ep}, {"etp", c.etp}};
  for (const auto& [key, value] : degrees) {
    if (value < 1) throw UsageError(fmt::format("parallel.{} = {}: at least 1", key, value));
  }
  if (c.dp < 0)
    throw UsageError(
        fmt::format("parallel.dp = {}: at least 1, or 0 for all remaining ranks", c.dp));
}

int data_parallel_degree(const MeshConfig& c, int world_size) {
  const std::int64_t others = std::int64_t{c.pp} * c.cp * c.tp;
  const bool divides = world_size % others == 0;
  if (c.dp == 0 && divides) return static_cast<int>(world_size / others);
  if (c.dp > 0 && others * c.dp == world_size) return c.dp;
  const std::string advice =
      divides ? fmt::format("with this pp, cp and tp, parallel.dp must be {}, or left out",
                            world_size / others)
              : fmt::format("pp x cp x tp = {} does not divide {}; nearest numbers of ranks: {}",
                            others,
                            world_size,
                            world_size > others ? fmt::format("{}, {}",
                                                              world_size / others * others,
                                                              (world_size / others + 1) * others)
                                                : fmt::format("{}", others));
  const std::string product =
      c.dp == 0 ? fmt::format("pp x cp x tp = {} x {} x {} = {}", c.pp, c.cp, c.tp, others)
                : fmt::format("pp x dp x cp x tp = {} x {} x {} x {} = {}",
                              c.pp,
                              c.dp,
                              c.cp,
                              c.tp,
                              others * c.dp);
  throw UsageError(
      fmt::format("parallel: {}, but there are {} ranks: {}", product, world_size, advice));
}

// The divisors of n next to `value`, as text.
std::string nearest_divisors(int n, int value) {
  int below = 1, above = n;
  for (int d = 1; d <= n; ++d) {
    if (n % d != 0) continue;
    if (d <= value) below = d;
    if (d >= value) {
      above = d;
      break;
    }
  }
  return below == above ? fmt::format("{}", below) : fmt::format("{}, {}", below, above);
}

int expert_data_parallel_degree(const MeshConfig& c, int dp) {
  const std::int64_t stage = std::int64_t{dp} * c.cp * c.tp, expert = std::int64_t{c.ep} * c.etp;
  if (stage % expert == 0) return static_cast<int>(stage / expert);
  const std::string advice =
      stage % c.etp == 0 ? fmt::format("with etp = {} the nearest ep: {}",
                                       c.etp,
                                       nearest_divisors(static_cast<int>(stage / c.etp), c.ep))
                         : fmt::format("etp does not divide {} either; nearest etp: {}",
                                       stage,
                                       nearest_divisors(static_cast<int>(stage), c.etp));
  throw UsageError(fmt::format(
      "parallel: dp x cp x tp = {} x {} x {} = {} is not a multiple of ep x etp = {} x {} = {}: {}",
      dp,
      c.cp,
      c.tp,
      stage,
      c.ep,
      c.etp,
      expert,
      advice));
}

}  // namespace

const char* name(Axis axis) noexcept {
  constexpr const char* kNames[] = {"pp", "dp", "cp", "tp", "edp", "ep", "etp"};
  return kNames[static_cast<std::size_t>(axis)];
}

MeshLayout::MeshLayout(const MeshConfig& config, int world_size) : world_size_(world_size) {
  MOESAIC_CHECK(world_size >= 1, "a mesh without ranks");
  check_degrees(config);
  const int dp = data_parallel_degree(config, world_size);
  extents_ = {config.pp,
              dp,
              config.cp,
              config.tp,
              expert_data_parallel_degree(config, dp),
              config.ep,
              config.etp};
}

int MeshLayout::coordinate(Axis axis, int world_rank) const {
  MOESAIC_CHECK(0 <= world_rank && world_rank < world_size_, "no such rank");
  const Family& family = is_in(kDense, axis) ? kDense : kExpert;
  int rest = world_rank;
  for (std::size_t i = family.size(); i-- > 0;) {
    if (family[i] == axis) return rest % extent(axis);
    rest /= extent(family[i]);
  }
  return 0;
}

std::vector<std::vector<int>> MeshLayout::groups(std::span<const Axis> axes) const {
  const std::set<Axis> chosen(axes.begin(), axes.end());
  MOESAIC_CHECK(!axes.empty() && chosen.size() == axes.size(),
                "a group needs axes, each named once");
  const auto all_in = [&](const Family& f) {
    return std::all_of(axes.begin(), axes.end(), [&](Axis a) { return is_in(f, a); });
  };
  MOESAIC_CHECK(all_in(kDense) || all_in(kExpert), "dense and expert axes in one group");
  const Family& family = all_in(kDense) ? kDense : kExpert;
  std::map<std::array<int, 4>, std::vector<int>> by_others;  // the coordinates that a group shares
  for (int r = 0; r < world_size_; ++r) {
    std::array<int, 4> others{};
    for (std::size_t i = 0; i < family.size(); ++i) {
      if (chosen.count(family[i]) == 0) others[i] = coordinate(family[i], r);
    }
    by_others[others].push_back(r);
  }
  std::vector<std::vector<int>> result;
  for (auto& [others, ranks] : by_others)
    result.push_back(std::move(ranks));
  std::sort(result.begin(), result.end());
  return result;
}

std::vector<int> MeshLayout::group_of(std::span<const Axis> axes, int world_rank) const {
  for (auto& group : groups(axes)) {
    if (std::binary_search(group.begin(), group.end(), world_rank)) return std::move(group);
  }
  throw InternalError("a rank without a group");
}

std::string MeshLayout::table() const {
  constexpr std::size_t kShown = 8;
  std::string text = fmt::format(
      "mesh of {} ranks: pp {} x dp {} x cp {} x tp {}; experts: pp {} x edp {} x ep {} x etp {}\n",
      world_size_,
      extent(Axis::pp),
      extent(Axis::dp),
      extent(Axis::cp),
      extent(Axis::tp),
      extent(Axis::pp),
      extent(Axis::edp),
      extent(Axis::ep),
      extent(Axis::etp));
  for (int i = 0; i < kNumAxes; ++i) {
    const auto axis = static_cast<Axis>(i);
    if (extent(axis) == 1) continue;
    const auto all = groups(std::span(&axis, 1));
    text += fmt::format("  {:<4}{:>5}  ", name(axis), extent(axis));
    for (std::size_t g = 0; g < std::min(kShown, all.size()); ++g) {
      const auto& ranks = all[g];
      const std::size_t shown = std::min(kShown, ranks.size());
      text += fmt::format(
          "{{{}{}}} ",
          fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(shown), " "),
          shown < ranks.size() ? fmt::format(" … {}", ranks.back()) : "");
    }
    text += all.size() > kShown ? fmt::format("… {} groups\n", all.size()) : "\n";
  }
  return text;
}

bool MeshPosition::same_ranks(const std::vector<Axis>& a, const std::vector<Axis>& b) const {
  if (!layout_ || a == b) return true;
  return layout_->group_of(a, rank_) == layout_->group_of(b, rank_);
}

MeshPosition::InGroup MeshPosition::in_group(const std::vector<Axis>& axes) const {
  if (!layout_ || axes.empty()) return {};
  const std::vector<int> ranks = layout_->group_of(axes, rank_);
  return {static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin()),
          static_cast<int>(ranks.size())};
}

struct Mesh::Impl {
  using Partition = std::vector<std::vector<int>>;

  Impl(const MeshConfig& config, Communicator& w)
      : layout(std::make_shared<MeshLayout>(config, w.size())), world(w) {}

  void make(const AxisList& axes) {
    const std::set<Axis> key(axes.begin(), axes.end());
    if (groups.count(key) > 0) return;
    const Partition partition = layout->groups(axes);
    std::size_t color = 0;
    while (!std::binary_search(partition[color].begin(), partition[color].end(), world.rank()))
      ++color;
    const auto& mine = partition[color];
    const int position =
        static_cast<int>(std::find(mine.begin(), mine.end(), world.rank()) - mine.begin());
    groups.emplace(
        key,
        ProcessGroup(mine, position, communicator(partition, static_cast<int>(color), position)));
  }

  Communicator* communicator(const Partition& partition, int color, int position) {
    if (partition.size() == static_cast<std::size_t>(world.size()))
      return nullptr;  // groups of one
    if (partition.size() == 1) return &world;
    auto& comm = communicators[partition];
    if (!comm) comm = world.split(color, position);
    return comm.get();
  }

  std::shared_ptr<const MeshLayout> layout;
  Communicator& world;
  std::map<Partition, std::unique_ptr<Communicator>> communicators;
  std::map<std::set<Axis>, ProcessGroup> groups;
};

Mesh::Mesh(const MeshConfig& config, Communicator& world, const std::vector<AxisList>& more_groups)
    : impl_(std::make_unique<Impl>(config, world)) {
  for (int i = 0; i < kNumAxes; ++i)
    impl_->make({static_cast<Axis>(i)});
  impl_->make({Axis::dp, Axis::cp});
  impl_->make({Axis::dp, Axis::cp, Axis::tp});
  impl_->make({Axis::cp, Axis::tp});
  impl_->make({Axis::edp, Axis::ep, Axis::etp});
  impl_->make({Axis::edp, Axis::etp});
  impl_->make({Axis::edp, Axis::ep});
  for (const auto& axes : more_groups)
    impl_->make(axes);
}
Mesh::~Mesh() = default;

const MeshLayout& Mesh::layout() const noexcept {
  return *impl_->layout;
}
MeshPosition Mesh::position() const {
  return {impl_->layout, rank()};
}
Communicator& Mesh::world() const noexcept {
  return impl_->world;
}
int Mesh::rank() const noexcept {
  return impl_->world.rank();
}

const ProcessGroup& Mesh::group(const AxisList& axes) const {
  const auto it = impl_->groups.find(std::set<Axis>(axes.begin(), axes.end()));
  if (it == impl_->groups.end()) {
    std::string names;
    for (const Axis a : axes)
      names += fmt::format("{}{}", names.empty() ? "" : ", ", name(a));
    check_failed(__FILE__,
                 __LINE__,
                 "group exists",
                 fmt::format("no group {{{}}} was made; list it when the mesh is built", names));
  }
  return it->second;
}

}  // namespace moesaic
