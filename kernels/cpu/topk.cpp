#include "kernels/ops/topk.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

template <class T>
struct Candidate {
  T score;
  std::int32_t index;
};

// The order of choice: total, because indices differ.
template <class T>
bool better(const Candidate<T>& a, const Candidate<T>& b) {
  return a.score > b.score || (a.score == b.score && a.index < b.index);
}

// Keeps the k best of a scanned row in a buffer of 2k candidates: when it is full, the worse half
// goes and the k-th score becomes the bar. A later entry at the bar loses to all k by its index, so
// only what is above it enters. O(n) time for one pass over the row, O(k) memory.
template <class T>
class Selector {
 public:
  explicit Selector(std::int64_t k) : k_(static_cast<std::size_t>(k)) { kept_.reserve(2 * k_); }

  std::vector<Candidate<T>>& select(const T* row, std::int64_t n) {
    constexpr T kLowest = -std::numeric_limits<T>::infinity();
    kept_.clear();
    T bar = kLowest;
    bool has_bar = false;
    for (std::int64_t i = 0; i < n; ++i) {
      const T score = row[i] != row[i] ? kLowest : row[i];
      if (has_bar && !(score > bar)) continue;
      kept_.push_back({score, static_cast<std::int32_t>(i)});
      if (kept_.size() < 2 * k_) continue;
      cut();
      bar = kept_.back().score;
      has_bar = true;
    }
    if (kept_.size() > k_) cut();
    return kept_;
  }

 private:
  // The k best stay, the k-th at the end.
  void cut() {
    const auto kth = kept_.begin() + static_cast<std::ptrdiff_t>(k_) - 1;
    std::nth_element(kept_.begin(), kth, kept_.end(), better<T>);
    kept_.resize(k_);
  }
  std::size_t k_;
  std::vector<Candidate<T>> kept_;
};

template <class T>
void choose(ThreadPool& pool, const TopK& op) {
  const std::int64_t rows = op.indices.dim(0), k = op.indices.dim(1), n = op.scores.dim(1);
  const auto* scores = op.scores.as<T>();
  const auto* valid = op.valid_count.as<std::int32_t>();
  auto* indices = op.indices.as<std::int32_t>();
  auto* counts = op.counts.as<std::int32_t>();
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 16) / std::max<std::int64_t>(1, n));
  pool.parallel_for(rows, grain, [&](std::int64_t begin, std::int64_t end) {
    Selector<T> selector(std::min(k, std::max<std::int64_t>(1, n)));
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t n_t = valid == nullptr ? n : std::clamp<std::int64_t>(valid[t], 0, n);
      auto& kept = selector.select(scores + t * n, n_t);
      if (op.order == TopK::Order::best_first) {
        std::sort(kept.begin(), kept.end(), better<T>);
      } else {
        std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) {
          return a.index < b.index;
        });
      }
      std::int32_t* out = indices + t * k;
      for (std::size_t j = 0; j < kept.size(); ++j)
        out[j] = kept[j].index;
      std::fill(out + kept.size(), out + k, -1);
      if (counts != nullptr) counts[t] = static_cast<std::int32_t>(kept.size());
    }
  });
}

void replay(const TopK& op) {
  const std::int64_t rows = op.indices.dim(0), k = op.indices.dim(1);
  const auto* given = op.given.as<std::int32_t>();
  auto* counts = op.counts.as<std::int32_t>();
  std::copy(given, given + rows * k, op.indices.as<std::int32_t>());
  if (counts == nullptr) return;
  for (std::int64_t t = 0; t < rows; ++t) {
    const auto* row = given + t * k;
    counts[t] = static_cast<std::int32_t>(
        std::count_if(row, row + k, [](std::int32_t i) { return i >= 0; }));
  }
}

}  // namespace

void launch(CpuContext& context, const TopK& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    if (!op.given.empty()) return replay(op);
    if (op.scores.dtype() == DType::f64) return choose<double>(pool, op);
    return choose<float>(pool, op);
  });
}

}  // namespace moesaic
