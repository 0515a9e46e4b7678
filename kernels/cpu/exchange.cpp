#include "kernels/ops/exchange.h"

#include <algorithm>

#include "kernels/cpu/stats.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

constexpr std::int64_t kGrain = 64;

void place(const ExpertPlaces& op) {
  const std::int64_t choices = op.topk.numel(), k = op.places.dim(1),
                     turns = op.place_of_expert.rank() == 2 ? op.place_of_expert.dim(1) : 1;
  const auto* topk = op.topk.as<std::int32_t>();
  const auto* kept = op.kept.as<std::uint8_t>();
  const auto* table = op.place_of_expert.as<std::int32_t>();
  auto* out = op.places.as<std::int32_t>();
  for (std::int64_t a = 0; a < choices; ++a) {
    MOESAIC_CHECK(-1 <= topk[a] && topk[a] < op.experts, "topk holds a number that is no expert");
    const bool dropped = topk[a] < 0 || (kept != nullptr && kept[a] == 0);
    out[a] = dropped ? -1 : table != nullptr ? table[topk[a] * turns + a / k % turns] : topk[a];
  }
  std::fill(out + choices, out + op.places.numel(), -1);
}

// The choices that are not dropped, sorted by group; equal groups are neighbours.
void group_row(const ExchangeGroups& op, std::int64_t r) {
  const std::int64_t k = op.places.dim(1);
  const auto* places = op.places.as<std::int32_t>() + r * k;
  auto* groups = op.groups.as<std::int32_t>() + r * k;
  auto* index = op.index.as<std::int32_t>() + r * k;
  std::int32_t group[ExchangeGroups::kMaxChoices];
  for (std::int64_t j = 0; j < k; ++j)
    group[j] = places[j] < 0 ? -1 : group_of(op.kind, op.grid, places[j], r);
  std::fill_n(groups, k, -1);
  std::int32_t last = -1, found = 0;
  for (std::int64_t j = 0; op.per_choice && j < k; ++j) {
    groups[j] = group[j];
    index[j] = group[j] < 0 ? -1 : static_cast<std::int32_t>(j);
  }
  if (op.per_choice) return;
  for (;; ++found) {
    std::int32_t next = -1;
    for (std::int64_t j = 0; j < k; ++j) {
      if (group[j] > last && (next < 0 || group[j] < next)) next = group[j];
    }
    if (next < 0) break;
    groups[found] = op.stride > 0 ? static_cast<std::int32_t>(next * op.stride + r) : next;
    for (std::int64_t j = 0; j < k; ++j) {
      if (group[j] == next) index[j] = found;
    }
    last = next;
  }
  for (std::int64_t j = 0; j < k; ++j) {
    if (group[j] < 0) index[j] = -1;
  }
}

// `last_row` [paths]: the row that was counted last.
void count(const ExchangeCounts& op, std::int64_t* last_row) {
  const std::int64_t rows = op.places.dim(0), k = op.places.dim(1);
  const auto paths = num_path_counts(op.hops, op.grid, op.hops.size);
  auto* counts = op.counts.as<std::int32_t>();
  std::fill_n(counts, op.counts.numel(), 0);
  std::fill_n(last_row, paths, -1);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int32_t p = op.places.as<std::int32_t>()[r * k + j];
      if (p < 0) continue;
      ++counts[paths + group_of(HopKind::owner, op.grid, p, r)];
      std::int64_t path = 0, begin = 0, width = 1;
      for (int h = 0; h < op.hops.size; ++h) {
        const HopKind kind = op.hops.kind[static_cast<std::size_t>(h)];
        const std::int32_t groups = num_groups(kind, op.grid);
        path = path * groups + group_of(kind, op.grid, p, r);
        width *= groups;
        auto& seen = last_row[begin + path];
        if (op.per_choice || seen != r) ++counts[begin + path];
        seen = r;
        begin += width;
      }
    }
  }
}

template <class A>
void take_choices(const ExchangeChoices& op, std::int64_t i) {
  const std::int64_t k = op.places.dim(1);
  const std::int64_t row = op.src.empty() ? i : op.src.as<std::int32_t>()[i];
  const auto* places = op.places.as<std::int32_t>() + row * k;
  const auto* to_item = op.to_item.empty() ? nullptr : op.to_item.as<std::int32_t>() + row * k;
  const auto* index = op.index.empty() ? nullptr : op.index.as<std::int32_t>() + row * k;
  for (std::int64_t j = 0; j < k; ++j) {
    const std::int32_t p = places[j];
    const bool mine = p >= 0 && op.keep_begin <= p && p < op.keep_end &&
                      (to_item == nullptr || to_item[index[j]] == op.first + i);
    op.places_out.as<std::int32_t>()[i * k + j] = !mine         ? -1
                                                  : op.localise ? p % op.places_per_owner
                                                                : p;
    op.weights_out.as<A>()[i * k + j] = mine ? op.weights.as<A>()[row * k + j] : A(0);
  }
}

}  // namespace

void launch(CpuContext& context, const ByteChecksum& op) {
  context.stream.enqueue([op] {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < op.x.bytes(); ++i)
      sum += checksum_term(i, static_cast<std::uint8_t>(op.x.data()[i]));
    *op.sum.as<std::int64_t>() = static_cast<std::int64_t>(sum);
  });
}

void launch(CpuContext& context, const ExpertPlaces& op) {
  context.stream.enqueue([op] { place(op); });
}

void launch(CpuContext& context, const ExchangeGroups& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    pool.parallel_for(op.places.dim(0), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r)
        group_row(op, r);
    });
  });
}

void launch(CpuContext& context, const ExchangeCounts& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView last_row = context.scratch.take(
      {num_path_counts(op.hops, op.grid, op.hops.size)}, DType::i64, "exchange_counts.last_row");
  context.stream.enqueue([op, last_row] { count(op, last_row.as<std::int64_t>()); });
}

void launch(CpuContext& context, const ExchangeChoices& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    cpu::dispatch_stats(op.weights.dtype(), [&]<class A>(TypeTag<A>) {
      pool.parallel_for(op.places_out.dim(0), kGrain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i)
          take_choices<A>(op, i);
      });
    });
  });
}

}  // namespace moesaic
