#include "kernels/ops/indexer.h"

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <numeric>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType stats_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

struct Sizes {
  std::vector<std::int32_t> lengths;                     // documents
  std::int64_t heads = 4, dim = 16, k = 8, queries = 0;  // queries: 0 = all positions
  std::int64_t tokens() const {
    return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  }
};
// Tiles of 64 +- 1, empty documents, more keys than k and fewer, one long document, decoding, odd widths.
const Sizes kSizes[] = {{{1}},
                        {{5, 0, 3, 0}, 3, 5, 2},
                        {{63, 1, 65}, 4, 16, 16},
                        {{64, 64}, 1, 64, 64},
                        {{129}, 4, 128, 32},
                        {{200, 0, 77, 300}, 7, 33, 50},
                        {{700}, 16, 64, 128},
                        {{150}, 4, 16, 20, 1},
                        {{333}, 4, 16, 20, 70}};

void fill_documents(const Twin& cu, const Sizes& s) {
  std::int32_t end = 0;
  cu.initial.data<std::int32_t>()[0] = 0;
  for (std::size_t d = 0; d < s.lengths.size(); ++d)
    cu.initial.data<std::int32_t>()[d + 1] = end += s.lengths[d];
}
// Small integers: products and sums are exact in every type and order, and scores tie often.
void fill_integers(TensorView view, std::uint64_t key, int range) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      const double u = standard_normal(key, static_cast<std::uint64_t>(i));
      view.as<T>()[i] = T(std::clamp<double>(std::round(u), -range, range));
    }
  });
}
// Ascending, without repetition, padded with -1; some entries lie outside of what the query sees and must be ignored.
void fill_selection(const Twin& selected, std::int64_t keys, std::uint64_t key) {
  const std::int64_t rows = selected.initial.view().dim(0), k = selected.initial.view().dim(1);
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t position = keys - rows + t;
    std::vector<std::int32_t> list;
    for (std::int64_t i = 0; i < k; ++i) {
      const double u = std::abs(standard_normal(key, static_cast<std::uint64_t>(t * k + i)));
      list.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(
          0, position + 2 - std::llround(u * 0.5 * static_cast<double>(keys)))));
    }
    list.push_back(static_cast<std::int32_t>(position));
    for (auto& s : list)
      s = std::min(s, static_cast<std::int32_t>(keys - 1));
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    list.resize(static_cast<std::size_t>(k), -1);
    std::copy(list.begin(), list.end(), selected.initial.data<std::int32_t>() + t * k);
  }
}

/// What a selection reads and writes: normal numbers.
struct Selection {
  Selection(const Sizes& s, DType dtype, DType w_type)
      : keys(s.tokens()),
        queries(s.queries == 0 ? keys : s.queries),
        qi({queries, s.heads, s.dim}, dtype),
        ki({keys, s.dim}, dtype),
        w({queries, s.heads}, w_type),
        cu({static_cast<std::int64_t>(s.lengths.size()) + 1}, DType::i32),
        selected({queries, s.k}, DType::i32) {
    fill_normal(qi.initial.view(), 1);
    fill_normal(ki.initial.view(), 2);
    fill_normal(w.initial.view(), 3);
    fill_documents(cu, s);
    std::fill_n(selected.initial.data<std::int32_t>(), selected.initial.view().numel(), -77);
  }
  std::vector<const Twin*> twins(std::initializer_list<const Twin*> more = {}) const {
    std::vector<const Twin*> all{&qi, &ki, &w, &cu, &selected};
    all.insert(all.end(), more);
    return all;
  }
  void reset(Stream& stream) const {
    for (const Twin* twin : twins())
      twin->reset(stream);
  }
  /// `side`: the view of a twin on one of the devices.
  template <class Side>
  IndexerSelect op(const Side& side, const TensorView& scores, const TensorView& given = {}) const {
    return {.selected = side(selected),
            .scores = scores,
            .qi = side(qi),
            .ki = side(ki),
            .w = side(w),
            .cu_seqlens = side(cu),
            .given = given};
  }

  std::int64_t keys, queries;
  Twin qi, ki, w, cu, selected;
};
TensorView on_device(const Twin& twin) {
  return twin.device.view();
}

void check_select(
    BothBackends& both, const Sizes& s, DType dtype, DType w_type, bool exact, bool with_scores) {
  const Selection c(s, dtype, w_type);
  INFO(c.queries << " queries, " << c.keys << " keys, " << s.heads << " x " << s.dim << ", k "
                 << s.k << ", " << name(dtype) << ", w " << name(w_type) << ", integers " << exact
                 << ", scores " << with_scores);
  const Twin scores({c.queries, c.keys}, stats_type(dtype));
  if (exact) {
    fill_integers(c.qi.initial.view(), 1, 2);
    fill_integers(c.ki.initial.view(), 2, 2);
    fill_integers(c.w.initial.view(), 3, 1);
  }
  fill_normal(scores.initial.view(), 4);
  // The order of a dot's sum differs between the sides. bf16 inputs are multiplied exactly and summed in f32.
  std::vector<Output> outputs = {{&c.selected, 0}};
  if (with_scores) outputs.push_back({&scores, dtype == DType::f64 ? 1e-13 : 2e-6});
  require_cuda_matches_cpu(both, c.twins({&scores}), outputs, [&](auto side) {
    return c.op(side, with_scores ? side(scores) : TensorView());
  });
}

void check_scores(BothBackends& both, const Sizes& s, DType dtype, DType w_type) {
  const Selection c(s, dtype, w_type);
  INFO(c.queries << " queries, " << c.keys << " keys, " << name(dtype) << ", w " << name(w_type));
  const Twin scores({c.queries, c.keys}, stats_type(dtype));
  require_cuda_matches_cpu(both, c.twins({&scores}), {{&scores, 2e-6}}, [&](auto side) {
    return c.op(side, side(scores));
  });
}

struct Attention {
  std::int64_t heads = 3, dn = 8, dr = 4, dv = 6;
};

void check_loss(BothBackends& both,
                const Sizes& s,
                const Attention& a,
                DType dtype,
                DType w_type,
                bool with_selection,
                bool gradients,
                double bound,
                std::pair<std::int64_t, std::int64_t> queries = {0, -1}) {
  const std::int64_t keys = s.tokens(), n = s.queries == 0 ? keys : s.queries;
  INFO(n << " queries, " << keys << " keys, " << s.lengths.size() << " documents, " << s.heads
         << " x " << s.dim << ", attention " << a.heads << " x " << a.dn << "+" << a.dr << ", k "
         << s.k << ", " << name(dtype) << ", w " << name(w_type) << ", selection " << with_selection
         << ", gradients " << gradients << ", queries " << queries.first << " to "
         << queries.second);
  const DType stats = stats_type(dtype);
  const Twin qi({n, s.heads, s.dim}, dtype), ki({keys, s.dim}, dtype), w({n, s.heads}, w_type),
      dqi({n, s.heads, s.dim}, dtype), dki({keys, s.dim}, dtype), dw({n, s.heads}, w_type),
      q({n, a.heads, a.dn + a.dr}, dtype), kvb({keys, a.heads, a.dn + a.dv}, dtype),
      kr({keys, a.dr}, dtype), lse({a.heads, n}, stats), kl({}, stats),
      cu({static_cast<std::int64_t>(s.lengths.size()) + 1}, DType::i32),
      selected({n, s.k}, DType::i32), tokens({}, DType::f64), o({n, a.heads, a.dv}, stats);
  std::uint64_t key = 1;
  for (const auto* t : {&qi, &ki, &w, &dqi, &dki, &dw, &q, &kvb, &kr, &lse, &kl, &o})
    fill_normal(t->initial.view(), key++);
  fill_documents(cu, s);
  fill_selection(selected, keys, 77);
  *tokens.initial.data<double>() = 37;
  const double scale = 1 / std::sqrt(static_cast<double>(a.dn + a.dr));
  const auto chosen = [&](TensorView v) { return with_selection ? v : TensorView(); };
  run(both.cpu.backend(),
      AttentionForward{.o = o.initial.view(),
                       .lse = lse.initial.view(),
                       .max_logit = {},
                       .q = q.initial.view(),
                       .kvb = kvb.initial.view(),
                       .kr = kr.initial.view(),
                       .cu_seqlens = cu.initial.view(),
                       .selected = chosen(selected.initial.view()),
                       .scale = scale});
  std::vector<Output> outputs = {{&kl, bound}};
  if (gradients) {
    for (const auto* t : {&dqi, &dki, &dw})
      outputs.push_back({t, bound});
  }
  require_cuda_matches_cpu(
      both,
      {&qi, &ki, &w, &dqi, &dki, &dw, &q, &kvb, &kr, &lse, &kl, &cu, &selected, &tokens},
      outputs,
      [&](auto side) {
        const auto wanted = [&](const Twin& t) { return gradients ? side(t) : TensorView(); };
        return IndexerLoss{.kl = side(kl),
                           .dqi = wanted(dqi),
                           .dki = wanted(dki),
                           .dw = wanted(dw),
                           .qi = side(qi),
                           .ki = side(ki),
                           .w = side(w),
                           .q = side(q),
                           .kvb = side(kvb),
                           .kr = side(kr),
                           .lse = side(lse),
                           .cu_seqlens = side(cu),
                           .selected = chosen(side(selected)),
                           .tokens = side(tokens),
                           .dn = a.dn,
                           .scale = scale,
                           .weight = 0.7,
                           .query_begin = queries.first,
                           .query_end = queries.second};
      });
}

}  // namespace

TEST_CASE("indexer selection on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_select(both, s, DType::f64, DType::f64, false, true);
    check_select(both, s, DType::f64, DType::f64, false, false);
  }
  // Heads times width a power of 4: the factor is exact too.
  for (const auto& s : {Sizes{{63, 1, 65}, 4, 16, 16},
                        {{129}, 4, 64, 32},
                        {{200, 0, 77, 300}, 16, 16, 50},
                        {{2500}, 4, 16, 2048}}) {
    check_select(both, s, DType::f32, DType::f32, true, true);
    check_select(both, s, DType::bf16, DType::f32, true, false);
    check_select(both, s, DType::bf16, DType::bf16, true, true);
  }
}

TEST_CASE("indexer selection on CUDA copies a given choice", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Selection c({{70}, 4, 16, 9}, DType::bf16, DType::f32);
  const Twin given({70, 9}, DType::i32);
  fill_selection(given, 70, 5);
  require_cuda_matches_cpu(both, c.twins({&given}), {{&c.selected, 0}}, [&](auto side) {
    return c.op(side, {}, side(given));
  });
}

TEST_CASE("indexer selection of a part of the queries on CUDA is that of all of them", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Sizes& s :
       {Sizes{{200, 0, 77, 300}, 7, 33, 50}, Sizes{{1200, 0, 300}, 64, 128, 256}}) {
    const Selection c(s, DType::bf16, DType::f32);
    const std::int64_t n = c.keys;
    c.reset(both.cuda.stream());
    IndexerSelect op = c.op(on_device, {});
    run(both.cuda.backend(), op);
    const auto all = download(c.selected.device.view(), both.cuda.stream());
    for (const std::pair<std::int64_t, std::int64_t>& part :
         {std::pair{std::int64_t{0}, n / 2}, {n / 2, n}, {n / 3, n / 3 + 70}}) {
      INFO("queries " << part.first << " to " << part.second << " of " << n);
      c.selected.reset(both.cuda.stream());
      op.query_begin = part.first;
      op.query_end = part.second;
      run(both.cuda.backend(), op);
      const auto own = download(c.selected.device.view(), both.cuda.stream());
      CHECK(same_bits(own.view().rows(part.first, part.second),
                      all.view().rows(part.first, part.second)));
    }
  }
}

TEST_CASE("indexer loss on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const bool selection : {false, true}) {
      check_loss(both, s, {}, DType::f64, DType::f64, selection, true, 1e-12);
      // f32: differences of probabilities cancel; bf16 results are rounded to 3 digits on both sides.
      check_loss(both, s, {}, DType::f32, DType::f32, selection, true, 1e-4);
      check_loss(both, s, {2, 64, 32, 32}, DType::bf16, DType::f32, selection, true, 4e-3);
    }
    if (s.queries == 1) continue;
    check_loss(both, s, {1, 5, 0, 3}, DType::bf16, DType::bf16, true, true, 4e-3);
    check_loss(both, s, {}, DType::f64, DType::f64, true, false, 1e-12);
    // Parts of the queries, from inside a tile and from its border.
    const std::int64_t n = s.queries == 0 ? s.tokens() : s.queries;
    for (const std::int64_t begin : {n / 3, n / 2 / 64 * 64}) {
      const std::pair part{begin, std::min(n, begin + n / 2 + 1)};
      check_loss(both, s, {}, DType::f64, DType::f64, false, true, 1e-12, part);
      check_loss(both, s, {}, DType::f64, DType::f64, true, true, 1e-12, part);
      check_loss(both, s, {2, 64, 32, 32}, DType::bf16, DType::f32, true, true, 4e-3, part);
      check_loss(both, s, {}, DType::f64, DType::f64, true, false, 1e-12, part);
    }
  }
}

TEST_CASE("indexer ops at the size of a large model", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both(std::size_t{512} << 20, std::size_t{512} << 20);
  // The factor 1/sqrt(64 x 128) rounds: sums are not exact, so only f32's rounding of the scores is left to compare.
  check_scores(both, {{1500, 0, 257, 243}, 64, 128, 2048}, DType::bf16, DType::f32);
  check_scores(both, {{1, 255, 300}, 64, 128, 2048}, DType::bf16, DType::bf16);
  check_scores(both, {{900}, 64, 128, 2048, 130}, DType::bf16, DType::f32);
  check_loss(both,
             {{700, 100}, 64, 128, 256},
             {4, 128, 64, 128},
             DType::bf16,
             DType::f32,
             true,
             true,
             6e-3);
  check_loss(
      both, {{300}, 64, 128, 256}, {4, 128, 64, 128}, DType::bf16, DType::bf16, false, true, 6e-3);
  // Several blocks of queries (5312 of them at a time), documents across their borders.
  const std::vector<std::int32_t> short_ones(56, 100);
  check_loss(both,
             {short_ones, 64, 128, 128},
             {1, 128, 64, 128},
             DType::bf16,
             DType::f32,
             false,
             true,
             6e-3);
  for (const std::pair<std::int64_t, std::int64_t>& part :
       {std::pair{std::int64_t{0}, std::int64_t{400}}, {400, 800}, {130, 517}}) {
    for (const bool selection : {false, true}) {
      check_loss(both,
                 {{700, 100}, 64, 128, 256},
                 {4, 128, 64, 128},
                 DType::bf16,
                 DType::f32,
                 selection,
                 true,
                 6e-3,
                 part);
    }
  }
}

TEST_CASE("indexer loss of the last queries on CUDA's tensor cores matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both(std::size_t{512} << 20, std::size_t{512} << 20);
  struct Observer : PathObserver {
    std::string last;
    void ran(const char* op, const char* path) override {
      if (std::string(op) == IndexerLoss::kName) last = path;
    }
  } observer;
  std::get<CudaContext>(both.cuda.backend()).paths = &observer;
  // Queries that begin inside a document, at its border, at that of a tile, and one alone; all of them, or a part.
  for (const std::int64_t queries : {800 - 130, 100, 672, 1, 333}) {
    const Sizes s{{700, 0, 100}, 64, 128, 256, queries};
    const Attention a{2, 128, 64, 128};
    for (const bool selection : {false, true})
      check_loss(both, s, a, DType::bf16, DType::f32, selection, true, 6e-3);
    const std::pair part{queries / 3, queries - queries / 4};
    check_loss(both, s, a, DType::bf16, DType::bf16, true, true, 6e-3, part);
    CHECK(observer.last == "tiled");
  }
  // Several blocks of queries, documents across their borders.
  const std::vector<std::int32_t> short_ones(60, 100);
  check_loss(both,
             {short_ones, 64, 128, 128, 5650},
             {1, 128, 64, 128},
             DType::bf16,
             DType::f32,
             false,
             true,
             6e-3);
}

TEST_CASE("indexer selection on tensor cores chooses by its own scores", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Sizes s{{1200, 0, 300}, 64, 128, 256};
  const Selection c(s, DType::bf16, DType::f32);
  const std::int64_t n = c.keys;
  const Twin scores({n, n}, DType::f32);
  c.reset(both.cuda.stream());
  scores.reset(both.cuda.stream());
  IndexerSelect op = c.op(on_device, scores.device.view());
  run(both.cuda.backend(), op);
  const auto chosen = download(c.selected.device.view(), both.cuda.stream()),
             all = download(scores.device.view(), both.cuda.stream());
  op.scores = {};  // through scratch, with the short rows left out
  run(both.cuda.backend(), op);
  const auto again = download(c.selected.device.view(), both.cuda.stream());
  CHECK(same_bits(chosen.view(), again.view()));
  std::int64_t wrong = 0;
  for (std::int64_t t = 0; t < n; ++t) {
    const std::int64_t begin = t < 1200 ? 0 : 1200, visible = t + 1 - begin,
                       count = std::min(visible, s.k);
    const float* row = all.data<float>() + t * n + begin;
    std::vector<std::int32_t> order(static_cast<std::size_t>(visible));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return row[a] > row[b]; });
    order.resize(static_cast<std::size_t>(count));
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < s.k; ++i) {
      const std::int32_t want =
          i < count ? order[static_cast<std::size_t>(i)] + static_cast<std::int32_t>(begin) : -1;
      wrong += chosen.data<std::int32_t>()[t * s.k + i] != want;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("indexer timings on CUDA", "[.bench]") {
  MOESAIC_NEEDS_CUDA();
  BackendOwner device({.device = kCuda, .scratch_bytes = std::size_t{2} << 30, .name = "bench"});
  for (const auto& documents : {std::vector<std::int32_t>{4096},
                                std::vector<std::int32_t>{8192},
                                std::vector<std::int32_t>(4, 4096)}) {
    const Sizes s{documents, 64, 128, 2048};
    const std::int64_t n = s.tokens();
    const Attention a{16, 128, 64, 128};
    const Selection c(s, DType::bf16, DType::f32);
    const Twin dqi({n, s.heads, s.dim}, DType::bf16), dki({n, s.dim}, DType::bf16),
        dw({n, s.heads}, DType::f32), q({n, a.heads, a.dn + a.dr}, DType::bf16),
        kvb({n, a.heads, a.dn + a.dv}, DType::bf16), kr({n, a.dr}, DType::bf16),
        lse({a.heads, n}, DType::f32), kl({}, DType::f32);
    std::uint64_t key = 4;
    for (const auto* t : {&q, &kvb, &kr, &lse, &kl})
      fill_normal(t->initial.view(), key++);
    c.reset(device.stream());
    for (const auto* t : {&q, &kvb, &kr, &lse, &kl})
      t->reset(device.stream());
    const IndexerSelect select = c.op(on_device, {});
    const IndexerLoss loss{.kl = kl.device.view(),
                           .dqi = dqi.device.view(),
                           .dki = dki.device.view(),
                           .dw = dw.device.view(),
                           .qi = c.qi.device.view(),
                           .ki = c.ki.device.view(),
                           .w = c.w.device.view(),
                           .q = q.device.view(),
                           .kvb = kvb.device.view(),
                           .kr = kr.device.view(),
                           .lse = lse.device.view(),
                           .cu_seqlens = c.cu.device.view(),
                           .selected = c.selected.device.view(),
                           .tokens = {},
                           .dn = a.dn,
                           .scale = 0.07};
    const auto time = [&](const char* what, const auto& op, int repeats) {
      run(device.backend(), op);
      device.stream().synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < repeats; ++i)
        run(device.backend(), op);
      device.stream().synchronize();
      const double seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
      std::printf("%-16s %zu x %d: %.3f ms, %.0f TFLOP/s\n",
                  what,
                  documents.size(),
                  documents[0],
                  seconds * 1e3,
                  op.cost().flops / seconds * 1e-12);
    };
    time("indexer_select", select, 30);
    time("indexer_loss", loss, 30);
  }
}

}  // namespace moesaic::test
