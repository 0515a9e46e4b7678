#include <cstring>

#include "kernels/cpu/indexer_common.h"
#include "kernels/cpu/select.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/indexer.h"

namespace moesaic {
namespace {
using namespace cpu;

template <class A>
struct Select {
  const IndexerSelect& op;
  IndexerInputs in;
  Visibility see;

  static std::size_t slot_size(const IndexerInputs& in) {
    const std::int64_t width = tiles_of(in.keys()) * kTile;
    const std::int64_t dots = kTile * std::max(kTile, in.heads());
    return slot_bytes<A>(
        {kTile * in.width(), kTile * in.heads(), kTile * in.dim(), dots, kTile * width, 2 * width});
  }

  // Scores of up to kTile queries against the keys that the last of them sees, score[i * ld + key].
  // Few queries are multiplied one by one, with the indexer heads as rows, instead of filling a
  // tile with nothing.
  void scores(const QueryBlock& b,
              std::int64_t begin,
              std::int64_t last,
              A* q,
              A* w,
              A* key_t,
              A* dots,
              A* score,
              std::int64_t ld) const {
    constexpr std::int64_t kFewQueries = 8;
    const bool single = in.queries() <= kFewQueries;
    load_rows(q, in.width(), in.query().from(b.row), b.count, kTile);
    load_rows(w, in.heads(), in.weight().from(b.row), b.count, kTile, static_cast<A>(in.factor()));
    for (std::int64_t s = 0; s <= last - begin; s += kTile) {
      load_transposed(
          key_t, in.key().from(begin + s), std::min(kTile, see.cu[b.document + 1] - begin - s));
      if (!single) {
        score_tile(score + s, ld, q, w, key_t, in.heads(), in.dim(), dots);
        continue;
      }
      for (std::int64_t i = 0; i < b.count; ++i) {
        blas_gemm(false,
                  false,
                  in.heads(),
                  kTile,
                  in.dim(),
                  A(1),
                  q + i * in.width(),
                  in.dim(),
                  key_t,
                  kTile,
                  A(0),
                  dots,
                  kTile);
        score_row(score + i * ld + s, w + i * in.heads(), dots, kTile, in.heads(), kTile);
      }
    }
  }

  void block(Slots& slots, const QueryBlock& b) const {
    if (b.row + b.count <= op.query_begin || b.row >= op.last_query()) return;
    Slots::Lease lease(slots);
    const std::int64_t ld = tiles_of(in.keys()) * kTile, k = op.selected.dim(1);
    A* q = lease.take<A>(kTile * in.width());
    A* w = lease.take<A>(kTile * in.heads());
    A* key_t = lease.take<A>(kTile * in.dim());
    A* dots = lease.take<A>(kTile * std::max(kTile, in.heads()));
    A* score = lease.take<A>(kTile * ld);
    auto* order = lease.take<order_key_t<A>>(2 * ld);
    const std::int64_t begin = see.cu[b.document], position = see.first + b.row,
                       last = position + b.count - 1;
    const bool choosing = op.given.empty();
    if (!op.scores.empty() || (choosing && last + 1 - begin > k))
      scores(b, begin, last, q, w, key_t, dots, score, ld);
    for (std::int64_t i = 0; i < b.count; ++i) {
      const std::int64_t visible = position + i + 1 - begin;
      if (choosing) {
        auto* out = op.selected.as<std::int32_t>() + (b.row + i) * k;
        const std::int64_t n = select_largest(score + i * ld, visible, k, out, order);
        for (std::int64_t c = 0; c < n; ++c)
          out[c] += static_cast<std::int32_t>(begin);
        std::fill(out + n, out + k, -1);
      }
      if (!op.scores.empty()) {
        A* row = op.scores.as<A>() + (b.row + i) * in.keys();
        std::fill_n(row, in.keys(), A(0));
        std::copy_n(score + i * ld, visible, row + begin);
      }
    }
  }
};

template <class A>
void select(CpuContext& context, const IndexerSelect& op) {
  const IndexerInputs in{op.qi, op.ki, op.w};
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = Select<A>::slot_size(in);
  const TensorView slot_memory =
      context.scratch.take({threads, static_cast<std::int64_t>(slot)}, DType::u8, "indexer tiles");
  const auto list_bytes = max_blocks(in.queries(), op.cu_seqlens.dim(0) - 1) *
                          static_cast<std::int64_t>(sizeof(QueryBlock));
  const TensorView list = context.scratch.take({list_bytes}, DType::u8, "indexer blocks");
  context.stream.enqueue([=, &pool = context.pool] {
    if (!op.given.empty()) std::memcpy(op.selected.data(), op.given.data(), op.selected.bytes());
    if (!op.given.empty() && op.scores.empty()) return;
    const Select<A> s{op, in, visibility(op.cu_seqlens, in.queries(), in.keys(), {})};
    auto* blocks = reinterpret_cast<QueryBlock*>(list.data());
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(list_blocks(s.see, blocks), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        s.block(slots, blocks[i]);
    });
  });
}

}  // namespace

void launch(CpuContext& context, const IndexerSelect& op) {
  op.qi.dtype() == DType::f64 ? select<double>(context, op) : select<float>(context, op);
}

}  // namespace moesaic
