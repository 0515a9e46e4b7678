#include "memory/offload/plan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "core/base/error.h"

namespace moesaic::offload {
namespace {

constexpr std::size_t kAlign = 256;
std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

/// Visits [begin, end] in which a tensor holds its place.
struct Stay {
  int begin = 0, end = 0;
};

/// The stays of the tensors that share a place; none overlap.
class Place {
 public:
  std::size_t bytes = 0;
  bool has_room(const std::vector<Stay>& stays) const {
    return std::none_of(stays.begin(), stays.end(), [&](const Stay& s) {
      const auto after = end_of_.upper_bound(s.end);
      return after != end_of_.begin() && std::prev(after)->second >= s.begin;
    });
  }
  void add(const std::vector<Stay>& stays) {
    for (const Stay& s : stays)
      end_of_[s.begin] = s.end;
  }

 private:
  std::map<int, int> end_of_;  // by begin
};

class Planner {
 public:
  Planner(std::span<const std::size_t> sizes,
          const std::vector<Visit>& visits,
          const Options& options)
      : options_(options), visits_(visits), uses_(sizes.size()), stays_(sizes.size()) {
    MOESAIC_CHECK(options.lead >= 1 && options.stay >= 2 * options.lead,
                  "a tensor must stay at least as long as it takes to leave and to come back");
    plan_.visits.resize(visits.size());
    for (const std::size_t bytes : sizes)
      plan_.tensors.push_back({.bytes = aligned(bytes)});
    for (std::size_t v = 0; v < visits.size(); ++v) {
      for (const Use& use : visits[v]) {
        auto& uses = uses_[at(use.tensor)];
        MOESAIC_CHECK(uses.empty() || uses.back().visit < static_cast<int>(v),
                      "a visit uses a tensor twice");
        uses.push_back({static_cast<int>(v), use.writes});
      }
    }
  }

  Plan run() {
    for (std::size_t t = 0; t < uses_.size(); ++t) {
      const auto& uses = uses_[t];
      for (std::size_t i = 0; i < uses.size();) {
        std::size_t end = i + 1;
        while (end < uses.size() && !uses[end].writes)
          ++end;
        live(static_cast<int>(t), i, end);
        i = end;
      }
    }
    find_places();
    for (const std::size_t bytes : plan_.places)
      plan_.device_bytes += bytes;
    return std::move(plan_);
  }

 private:
  struct UseAt {
    int visit;
    bool writes;
  };

  // Uses [begin, end) of a tensor: one life.
  void live(int tensor, std::size_t begin, std::size_t end) {
    const auto& uses = uses_[at(tensor)];
    MOESAIC_CHECK(uses[begin].writes, "a tensor is read before it is written");
    Plan::Tensor& t = plan_.tensors[at(tensor)];
    const int born = uses[begin].visit;
    step(born).writes.push_back(tensor);
    Stay stay{born, born};
    bool is_stored = false;
    for (std::size_t i = begin + 1; i < end; ++i) {
      const int next = uses[i].visit;
      if (next - uses[i - 1].visit > options_.stay) {
        if (!is_stored) {
          is_stored = true;
          step(born).stores.push_back(tensor);
          plan_.bytes_out += t.bytes;
          if (t.home < 0) {
            t.home = static_cast<std::int64_t>(plan_.host_bytes);
            plan_.host_bytes += t.bytes;
          }
          stay.end = std::max(stay.end, born + options_.lead);
        }
        leave(tensor, uses[i - 1].visit, stay);
        stay = {next - options_.lead, next};
        step(stay.begin).loads.push_back(tensor);
        step(next).awaits.push_back(tensor);
        plan_.bytes_in += t.bytes;
      }
      stay.end = std::max(stay.end, next);
    }
    leave(tensor, uses[end - 1].visit, stay);
  }

  void leave(int tensor, int last_use, const Stay& stay) {
    step(last_use).leaves.push_back(tensor);
    stays_[at(tensor)].push_back(stay);
  }

  // First come, first served; where the least memory is added, and then where the least is left over.
  void find_places() {
    std::vector<std::size_t> order(stays_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    order.erase(std::remove_if(
                    order.begin(), order.end(), [&](std::size_t t) { return stays_[t].empty(); }),
                order.end());
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return stays_[a].front().begin < stays_[b].front().begin;
    });
    std::vector<Place> places;
    for (const std::size_t t : order) {
      Plan::Tensor& tensor = plan_.tensors[t];
      std::size_t best = places.size(), best_growth = tensor.bytes, best_waste = 0;
      for (std::size_t p = 0; p < places.size(); ++p) {
        const std::size_t has = places[p].bytes;
        const std::size_t growth = tensor.bytes > has ? tensor.bytes - has : 0,
                          waste = has > tensor.bytes ? has - tensor.bytes : 0;
        const bool is_better =
            growth < best_growth || (growth == best_growth && waste < best_waste);
        if (is_better && places[p].has_room(stays_[t])) {
          best = p;
          best_growth = growth;
          best_waste = waste;
        }
      }
      if (best == places.size()) places.emplace_back();
      places[best].bytes = std::max(places[best].bytes, tensor.bytes);
      places[best].add(stays_[t]);
      tensor.place = static_cast<int>(best);
    }
    for (const Place& place : places)
      plan_.places.push_back(place.bytes);
  }

  Plan::Step& step(int visit) { return plan_.visits[at(visit)]; }

  Options options_;
  const std::vector<Visit>& visits_;
  std::vector<std::vector<UseAt>> uses_;  // by tensor, in order
  std::vector<std::vector<Stay>> stays_;
  Plan plan_;
};

}  // namespace

Plan make_plan(std::span<const std::size_t> sizes,
               const std::vector<Visit>& visits,
               const Options& options) {
  return Planner(sizes, visits, options).run();
}

}  // namespace moesaic::offload
