#include "kernels/cpu/indexer_loss.h"

namespace moesaic {
namespace cpu {
namespace {

template <class A>
struct DenseLoss {
  const IndexerLoss& op;
  ThreadPool& pool;
  AttentionInputs attention;
  IndexerInputs indexer;
  Visibility see;
  SelectionBits bits;
  PathRule rule;
  std::int64_t width = 0;  // columns of the row buffers: all keys, whole tiles
  A factor = 0;            // weight / tokens
  // Of the document at hand:
  A* attention_key_t = nullptr;  // [tiles, H, dqk, kTile]
  A* key_t = nullptr;            // [tiles, dI, kTile]
  A* key = nullptr;              // [width, dI]
  A* dkey = nullptr;             // [width, dI]
  // Of the query block at hand:
  A* q = nullptr;       // [kTile, H dqk], scaled
  A* lse = nullptr;     // [H, kTile]
  A* qi = nullptr;      // [kTile, HI dI]
  A* w = nullptr;       // [kTile, HI], times ct
  A* target = nullptr;  // [kTile, width]
  A* index = nullptr;   // [kTile, width]: scores, then their gradients
  A* dots = nullptr;    // [tiles, HI, kTile, kTile]: <q_j, k>, then gradients of it
  A* dqi = nullptr;     // [tiles, kTile, HI dI]: one part per key tile
  A* dw = nullptr;      // [tiles, kTile, HI]
  A* kl = nullptr;      // [T]

  std::int64_t heads() const { return attention.size.heads; }
  std::int64_t dqk() const { return attention.size.dqk(); }

  // Places the buffers in one piece of memory and returns its size in elements; `to` null = the
  // size only.
  static std::int64_t layout(DenseLoss* to,
                             A* memory,
                             const AttentionSizes& a,
                             const IndexerInputs& i,
                             std::int64_t longest) {
    const std::int64_t tiles = tiles_of(longest), width = tiles * kTile;
    std::int64_t used = 0;
    const auto place = [&](A* DenseLoss::*member, std::int64_t n) {
      if (to != nullptr) to->*member = memory + used;
      used += (n + 15) / 16 * 16;
    };
    place(&DenseLoss::attention_key_t, width * a.heads * a.dqk());
    place(&DenseLoss::key_t, width * i.dim());
    place(&DenseLoss::key, width * i.dim());
    place(&DenseLoss::dkey, width * i.dim());
    place(&DenseLoss::q, kTile * a.heads * a.dqk());
    place(&DenseLoss::lse, kTile * a.heads);
    place(&DenseLoss::qi, kTile * i.width());
    place(&DenseLoss::w, kTile * i.heads());
    place(&DenseLoss::target, kTile * width);
    place(&DenseLoss::index, kTile * width);
    place(&DenseLoss::dots, tiles * i.heads() * kTile * kTile);
    place(&DenseLoss::dqi, tiles * kTile * i.width());
    place(&DenseLoss::dw, tiles * kTile * i.heads());
    place(&DenseLoss::kl, a.queries);
    return used;
  }

  void load_document(std::int64_t first, std::int64_t n) {
    pool.parallel_for(tiles_of(n), 1, [&](std::int64_t tile, std::int64_t) {
      const std::int64_t s = tile * kTile, count = std::min(kTile, n - s);
      for (std::int64_t h = 0; h < heads(); ++h) {
        attention.load_key_transposed(
            attention_key_t + (tile * heads() + h) * dqk() * kTile, h, first + s, count);
      }
      load_transposed(key_t + s * indexer.dim(), indexer.key().from(first + s), count);
      load_rows(
          key + s * indexer.dim(), indexer.dim(), indexer.key().from(first + s), count, kTile);
      std::fill_n(dkey + s * indexer.dim(), kTile * indexer.dim(), A(0));
    });
  }

  void load_block(std::int64_t row, std::int64_t count) {
    const std::int64_t all = heads() * dqk();
    load_rows(q, all, Rows{op.q, row * all, all, all}, count, kTile, static_cast<A>(op.scale));
    for (std::int64_t h = 0; h < heads(); ++h) {
      std::fill_n(lse + h * kTile, kTile, A(0));
      std::copy_n(op.lse.as<A>() + h * attention.size.queries + row, count, lse + h * kTile);
    }
    load_rows(qi, indexer.width(), indexer.query().from(row), count, kTile);
    load_rows(w,
              indexer.heads(),
              indexer.weight().from(row),
              count,
              kTile,
              static_cast<A>(indexer.factor()));
  }

  TileMask mask(std::int64_t first, std::int64_t row, std::int64_t count, std::int64_t tile) const {
    return bits.mask(row, count, see.first + row - first, tile);
  }

  // target = sum_h exp(logit_h - lse_h) and index scores of one tile, hidden pairs 0 and -inf.
  void first_pass(std::int64_t tile, const TileMask& hidden, A* scratch) const {
    A* sum = target + tile * kTile;
    A* score = index + tile * kTile;
    if (hidden.none()) {
      for (std::int64_t i = 0; i < hidden.count; ++i) {
        std::fill_n(sum + i * width, kTile, A(0));
        std::fill_n(score + i * width, kTile, -std::numeric_limits<A>::infinity());
      }
      return;
    }
    for (std::int64_t i = 0; i < kTile; ++i)
      std::fill_n(sum + i * width, kTile, A(0));
    for (std::int64_t h = 0; h < heads(); ++h) {
      blas_gemm(false,
                false,
                kTile,
                kTile,
                dqk(),
                A(1),
                q + h * dqk(),
                heads() * dqk(),
                attention_key_t + (tile * heads() + h) * dqk() * kTile,
                kTile,
                A(0),
                scratch,
                kTile);
      for (std::int64_t i = 0; i < hidden.count; ++i) {
        const A log_sum = lse[h * kTile + i];
        const A* logit = scratch + i * kTile;
        A* out = sum + i * width;
#pragma omp simd
        for (std::int64_t c = 0; c < kTile; ++c)
          out[c] += cpu::exp(logit[c] - log_sum);
      }
    }
    score_tile(score,
               width,
               qi,
               w,
               key_t + tile * indexer.dim() * kTile,
               indexer.heads(),
               indexer.dim(),
               dots + tile * indexer.heads() * kTile * kTile,
               true);
    if (hidden.full()) return;
    for (std::int64_t i = 0; i < hidden.count; ++i) {
      hidden.hide(sum + i * width, i, A(0));
      hidden.hide(score + i * width, i, -std::numeric_limits<A>::infinity());
    }
  }

  // Gradients of one tile from dI, which now stands in `index`.
  void second_pass(std::int64_t tile, std::int64_t count) const {
    const std::int64_t dim = indexer.dim(), all = indexer.width(), s = tile * kTile;
    for (std::int64_t j = 0; j < indexer.heads(); ++j) {
      A* da = dots + (tile * indexer.heads() + j) * kTile * kTile;
      for (std::int64_t i = 0; i < kTile; ++i) {
        A* dot = da + i * kTile;
        const A* d = index + i * width + s;
        const A weight = w[i * indexer.heads() + j];
        A sum = 0;
        if (i >= count) {
          std::fill_n(dot, kTile, A(0));
        } else {
#pragma omp simd reduction(+ : sum)
          for (std::int64_t c = 0; c < kTile; ++c) {
            sum += d[c] * (dot[c] < A(0) ? A(0) : dot[c]);
            dot[c] = dot[c] > A(0) ? weight * d[c] : A(0);
          }
        }
        dw[(tile * kTile + i) * indexer.heads() + j] = sum;
      }
      blas_gemm(false,
                false,
                kTile,
                dim,
                kTile,
                A(1),
                da,
                kTile,
                key + s * dim,
                dim,
                A(0),
                dqi + tile * kTile * all + j * dim,
                all);
      blas_gemm(true,
                false,
                kTile,
                dim,
                kTile,
                A(1),
                da,
                kTile,
                qi + j * dim,
                all,
                A(1),
                dkey + s * dim,
                dim);
    }
  }

  // Adds the parts of the key tiles in order and stores the block's dqi and dw.
  void store_block(std::int64_t first,
                   std::int64_t row,
                   std::int64_t count,
                   std::int64_t tiles) const {
    constexpr std::int64_t kRows = 8;
    pool.parallel_for(count, kRows, [&](std::int64_t begin, std::int64_t end) {
      const auto sum_into = [&](A* parts, std::int64_t cols) {
        bool started = false;
        A* total = parts + begin * cols;  // tile 0's own place
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          if (mask(first, row, count, tile).none()) continue;
          const A* part = total + tile * kTile * cols;
          for (std::int64_t c = 0; c < (end - begin) * cols; ++c)
            total[c] = started ? total[c] + part[c] : part[c];
          started = true;
        }
        if (!started) std::fill_n(total, (end - begin) * cols, A(0));
        return total;
      };
      const std::int64_t all = indexer.width(), heads_here = indexer.heads();
      store_rows(op.dqi, (row + begin) * all, all, end - begin, all, sum_into(dqi, all), all);
      store_rows(op.dw,
                 (row + begin) * heads_here,
                 heads_here,
                 end - begin,
                 heads_here,
                 sum_into(dw, heads_here),
                 heads_here,
                 static_cast<A>(indexer.factor()));
    });
  }

  void document(Slots& slots, std::int64_t doc) {
    const std::int64_t first = see.cu[doc], n = see.cu[doc + 1] - first,
                       rows_begin = see.query_begin(doc), rows_end = see.query_end(doc);
    if (n == 0) return;
    if (rule.rows(n, n)) {
      std::fill(kl + rows_begin, kl + rows_end, A(0));
      return;
    }
    load_document(first, n);
    for (std::int64_t row = rows_begin; row < rows_end; row += kTile) {
      const std::int64_t count = std::min(kTile, rows_end - row),
                         tiles = (see.first + row + count - 1 - first) / kTile + 1;
      if (row + count <= op.query_begin || row >= op.last_query()) {
        std::fill_n(kl + row, count, A(0));
        clear_query_gradients(op, row, row + count);
        continue;
      }
      load_block(row, count);
      pool.parallel_for(tiles, 1, [&](std::int64_t tile, std::int64_t) {
        Slots::Lease lease(slots);
        first_pass(tile, mask(first, row, count, tile), lease.take<A>(kTile * kTile));
      });
      constexpr std::int64_t kRows = 8;
      pool.parallel_for(count, kRows, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          kl[row + i] = kl_row(target + i * width, index + i * width, tiles * kTile, factor);
          if (op.counts(row + i)) continue;
          kl[row + i] = A(0);
          std::fill_n(index + i * width, tiles * kTile, A(0));
        }
      });
      if (op.dqi.empty()) continue;
      pool.parallel_for(tiles, 1, [&](std::int64_t tile, std::int64_t) {
        if (!mask(first, row, count, tile).none()) second_pass(tile, count);
      });
      store_block(first, row, count, tiles);
    }
    if (!op.dqi.empty())
      store_rows(
          op.dki, first * indexer.dim(), indexer.dim(), n, indexer.dim(), dkey, indexer.dim());
  }
};

}  // namespace

template <class A>
void indexer_loss_dense(CpuContext& context, const IndexerLoss& op) {
  const AttentionSizes size = attention_sizes(op.q, op.kvb, op.dn);
  const IndexerInputs indexer{op.qi, op.ki, op.w};
  const PathRule rule = path_rule(op);
  const std::int64_t longest = rule.longest_dense(size.keys);
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const TensorView memory =
      context.scratch.take({DenseLoss<A>::layout(nullptr, nullptr, size, indexer, longest)},
                           dtype_of<A>,
                           "indexer loss");
  const std::size_t slot = slot_bytes<A>({kTile * kTile});
  const TensorView slot_memory =
      context.scratch.take({threads, static_cast<std::int64_t>(slot)}, DType::u8, "indexer tiles");
  const TensorView words = SelectionBits::take(context.scratch, rule, size.queries, size.keys);
  context.stream.enqueue([=, &pool = context.pool] {
    const Visibility see = visibility(op.cu_seqlens, size.queries, size.keys, op.selected);
    DenseLoss<A> loss{
        op, pool, {size, op.q, op.kvb, op.kr}, indexer, see, {pool, words, see, rule}, rule};
    loss.width = tiles_of(longest) * kTile;
    loss.factor = static_cast<A>(op.weight / divisor(op.tokens));
    DenseLoss<A>::layout(&loss, memory.as<A>(), size, indexer, longest);
    Slots slots(slot_memory.data(), slot, threads);
    for (std::int64_t doc = 0; doc < see.documents; ++doc)
      loss.document(slots, doc);
    add_rows_to_scalar(op.kl, loss.kl, size.queries);
  });
}
template void indexer_loss_dense<float>(CpuContext&, const IndexerLoss&);
template void indexer_loss_dense<double>(CpuContext&, const IndexerLoss&);

}  // namespace cpu

void launch(CpuContext& context, const IndexerLoss& op) {
  const bool f64 = op.qi.dtype() == DType::f64;
  const cpu::PathRule rule = cpu::path_rule(op);
  const std::int64_t keys = op.kvb.dim(0);
  if (rule.longest_dense(keys) > 0)
    f64 ? cpu::indexer_loss_dense<double>(context, op)
        : cpu::indexer_loss_dense<float>(context, op);
  if (rule.rows(keys, keys))
    f64 ? cpu::indexer_loss_rows<double>(context, op) : cpu::indexer_loss_rows<float>(context, op);
}

}  // namespace moesaic
