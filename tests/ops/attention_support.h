#pragma once
// Attention problems on the host in double, naive formulas, and one call to run an op on them.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "kernels/ops/attention.h"

namespace moesaic::attention_test {

using Values = std::vector<double>;
using Ints = std::vector<std::int32_t>;

inline Values normal(std::size_t n, std::uint64_t key, double size = 1.0) {
  Values v(n);
  for (std::size_t i = 0; i < n; ++i)
    v[i] = size * standard_normal(key, i);
  return v;
}
/// Rounded to bf16, so that bf16 storage holds the same numbers.
inline Values rounded(Values v) {
  for (auto& x : v)
    x = static_cast<float>(bf16(x));
  return v;
}

/// Device memory of one test; every float tensor that an op overwrites starts as NaN.
class Memory {
 public:
  TensorView floats(const Values& values, Shape shape, DType dtype) {
    TensorView v = raw(shape, dtype);
    dispatch_float(dtype, [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < values.size(); ++i)
        v.as<T>()[i] = T(static_cast<acc_t<T>>(values[i]));
    });
    return v;
  }
  TensorView poisoned(Shape shape, DType dtype) {
    return floats(
        Values(static_cast<std::size_t>(shape.numel()), std::numeric_limits<double>::quiet_NaN()),
        shape,
        dtype);
  }
  TensorView ints(const Ints& values, Shape shape) {
    TensorView v = raw(shape, DType::i32);
    std::copy(values.begin(), values.end(), v.as<std::int32_t>());
    return v;
  }
  TensorView raw(Shape shape, DType dtype) {
    buffers_.emplace_back(
        byte_size(dtype) * static_cast<std::size_t>(shape.numel()) + 1, kCpu, "test");
    return buffers_.back().view(shape, dtype);
  }

 private:
  std::vector<Buffer> buffers_;
};
inline Values read(const ConstTensorView& v) {
  Values out(static_cast<std::size_t>(v.numel()));
  dispatch_float(v.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<double>(v.as<T>()[i]);
  });
  return out;
}
inline Ints read_ints(const ConstTensorView& v) {
  return {v.as<std::int32_t>(), v.as<std::int32_t>() + v.numel()};
}

/// Runs an op on a fresh backend whose scratch memory is poisoned; its size comes from a dry run.
template <class Op>
void run_once(const Op& op, int threads = 1) {
  BackendOwner dry({.mode = Stream::Mode::dry, .num_threads = threads});
  run(dry.backend(), op);
  BackendOwner owner(
      {.num_threads = threads, .scratch_bytes = dry.scratch().high_water_bytes() + 256});
  owner.scratch().poison();
  run(owner.backend(), op);
  owner.stream().synchronize();
}

struct Problem {
  std::int64_t tq = 0, tk = 0, heads = 1, dn = 4, dr = 2, dv = 3, k = 0;
  Ints cu;
  Values q, kvb, kr, d_o;
  Ints selected;
  double scale = 0.5;
};

/// Random problem; documents as given, queries = all keys.
inline Problem make_problem(const Ints& lengths,
                            std::int64_t heads,
                            std::int64_t dn,
                            std::int64_t dr,
                            std::int64_t dv,
                            std::uint64_t seed = 7) {
  Problem p{.heads = heads,
            .dn = dn,
            .dr = dr,
            .dv = dv,
            .cu = {0},
            .q = {},
            .kvb = {},
            .kr = {},
            .d_o = {},
            .selected = {}};
  for (const auto n : lengths)
    p.cu.push_back(p.cu.back() + n);
  p.tq = p.tk = p.cu.back();
  const auto size = [&](std::int64_t n) { return static_cast<std::size_t>(n); };
  p.q = rounded(normal(size(p.tq * heads * (dn + dr)), seed + 1));
  p.kvb = rounded(normal(size(p.tk * heads * (dn + dv)), seed + 2));
  p.kr = rounded(normal(size(p.tk * dr), seed + 3));
  p.d_o = rounded(normal(size(p.tq * heads * dv), seed + 4));
  p.scale = 1.0 / std::sqrt(static_cast<double>(dn + dr));
  return p;
}
inline std::int64_t document_begin(const Problem& p, std::int64_t position) {
  std::int64_t begin = 0;
  for (const auto c : p.cu)
    begin = c <= position ? c : begin;
  return begin;
}
/// A random selection of up to k visible keys per query.
inline void select_random(Problem& p, std::int64_t k, std::uint64_t seed = 99) {
  p.k = k;
  p.selected.assign(static_cast<std::size_t>(p.tq * k), -1);
  for (std::int64_t t = 0; t < p.tq; ++t) {
    const std::int64_t begin = document_begin(p, t), n = t + 1 - begin;
    std::int64_t written = 0;
    for (std::int64_t s = begin; s <= t && written < k;
         ++s) {  // selection sampling: k of n, ascending
      const auto draw = uniform(seed, static_cast<std::uint64_t>(t * p.tk + s));
      if (draw * static_cast<double>(n - (s - begin)) < static_cast<double>(k - written)) {
        p.selected[static_cast<std::size_t>(t * k + written++)] = static_cast<std::int32_t>(s);
      }
    }
  }
}
/// Rows [begin, end) of a tensor whose rows have `width` elements.
template <class T>
std::vector<T> rows_of(const std::vector<T>& all,
                       std::int64_t begin,
                       std::int64_t end,
                       std::int64_t width) {
  return {all.begin() + begin * width, all.begin() + end * width};
}
/// Queries [begin, end) with all keys before `end`: what a context-parallel rank computes of a problem with all queries.
inline Problem piece_of(const Problem& whole, std::int64_t begin, std::int64_t end) {
  Problem p = whole;
  p.tq = end - begin;
  p.tk = end;
  std::erase_if(p.cu, [&](std::int32_t c) { return c >= end; });
  p.cu.push_back(static_cast<std::int32_t>(end));
  p.q = rows_of(whole.q, begin, end, p.heads * (p.dn + p.dr));
  p.d_o = rows_of(whole.d_o, begin, end, p.heads * p.dv);
  p.kvb = rows_of(whole.kvb, 0, end, p.heads * (p.dn + p.dv));
  p.kr = rows_of(whole.kr, 0, end, p.dr);
  if (p.k > 0) p.selected = rows_of(whole.selected, begin, end, p.k);
  return p;
}
/// all += part, which may be shorter.
inline void add_part(Values& all, const Values& part) {
  for (std::size_t i = 0; i < part.size(); ++i)
    all[i] += part[i];
}
inline void append(Values& all, const Values& part) {
  all.insert(all.end(), part.begin(), part.end());
}

/// The visible keys of query row i, ascending.
inline std::vector<std::int64_t> visible_keys(const Problem& p, std::int64_t i) {
  const std::int64_t position = p.tk - p.tq + i, begin = document_begin(p, position);
  std::vector<std::int64_t> keys;
  if (p.k == 0) {
    for (std::int64_t s = begin; s <= position; ++s)
      keys.push_back(s);
  } else {
    for (std::int64_t j = 0; j < p.k; ++j) {
      const auto s = p.selected[static_cast<std::size_t>(i * p.k + j)];
      if (s >= begin && s <= position) keys.push_back(s);
    }
  }
  return keys;
}
inline double logit(const Problem& p, std::int64_t h, std::int64_t t, std::int64_t s) {
  double sum = 0;
  const auto* q = p.q.data() + (t * p.heads + h) * (p.dn + p.dr);
  const auto* k = p.kvb.data() + (s * p.heads + h) * (p.dn + p.dv);
  for (std::int64_t c = 0; c < p.dn; ++c)
    sum += q[c] * k[c];
  for (std::int64_t c = 0; c < p.dr; ++c)
    sum += q[p.dn + c] * p.kr[static_cast<std::size_t>(s * p.dr + c)];
  return sum * p.scale;
}

struct Outputs {
  Values o, lse, max_logit;
  Values dq, dkvb, dkr;
};

/// Forward by the definition, in double.
inline Outputs naive_forward(const Problem& p) {
  Outputs r;
  r.o.assign(static_cast<std::size_t>(p.tq * p.heads * p.dv), 0);
  r.lse.assign(static_cast<std::size_t>(p.heads * p.tq), -std::numeric_limits<double>::infinity());
  r.max_logit.assign(static_cast<std::size_t>(p.heads), -std::numeric_limits<double>::infinity());
  for (std::int64_t h = 0; h < p.heads; ++h) {
    for (std::int64_t t = 0; t < p.tq; ++t) {
      double total = 0;
      auto* o = r.o.data() + (t * p.heads + h) * p.dv;
      for (const auto s : visible_keys(p, t)) {
        const double l = logit(p, h, t, s), e = std::exp(l);
        total += e;
        r.max_logit[static_cast<std::size_t>(h)] =
            std::max(r.max_logit[static_cast<std::size_t>(h)], l);
        for (std::int64_t c = 0; c < p.dv; ++c)
          o[c] += e * p.kvb[static_cast<std::size_t>((s * p.heads + h) * (p.dn + p.dv) + p.dn + c)];
      }
      if (total == 0) continue;
      for (std::int64_t c = 0; c < p.dv; ++c)
        o[c] /= total;
      r.lse[static_cast<std::size_t>(h * p.tq + t)] = std::log(total);
    }
  }
  return r;
}

struct Options {
  Precision precision = kF64;
  AttentionPath path = AttentionPath::automatic;
  int threads = 1;
  bool backward = true;
};

/// Forward, and backward with cotangent d_o, through the ops.
inline Outputs run_attention(const Problem& p, const Options& options) {
  Memory m;
  const DType compute = options.precision.compute, stats = options.precision.stats;
  const auto q = m.floats(p.q, {p.tq, p.heads, p.dn + p.dr}, compute);
  const auto kvb = m.floats(p.kvb, {p.tk, p.heads, p.dn + p.dv}, compute);
  const auto kr = p.dr > 0 ? m.floats(p.kr, {p.tk, p.dr}, compute) : TensorView();
  const auto cu = m.ints(p.cu, {static_cast<std::int64_t>(p.cu.size())});
  const auto selected = p.k > 0 ? m.ints(p.selected, {p.tq, p.k}) : TensorView();
  AttentionForward forward{.o = m.poisoned({p.tq, p.heads, p.dv}, stats),
                           .lse = m.poisoned({p.heads, p.tq}, stats),
                           .max_logit = m.poisoned({p.heads}, stats),
                           .q = q,
                           .kvb = kvb,
                           .kr = kr,
                           .cu_seqlens = cu,
                           .selected = selected,
                           .scale = p.scale,
                           .accumulate_max = false,
                           .path = options.path};
  run_once(forward, options.threads);
  Outputs r{read(forward.o), read(forward.lse), read(forward.max_logit), {}, {}, {}};
  if (!options.backward) return r;
  AttentionBackward backward{.dq = m.poisoned(q.shape(), compute),
                             .dkvb = m.poisoned(kvb.shape(), compute),
                             .dkr = p.dr > 0 ? m.poisoned(kr.shape(), compute) : TensorView(),
                             .d_o = m.floats(p.d_o, forward.o.shape(), stats),
                             .o = forward.o,
                             .lse = forward.lse,
                             .q = q,
                             .kvb = kvb,
                             .kr = kr,
                             .cu_seqlens = cu,
                             .selected = selected,
                             .scale = p.scale,
                             .path = options.path};
  run_once(backward, options.threads);
  r.dq = read(backward.dq);
  r.dkvb = read(backward.dkvb);
  if (p.dr > 0) r.dkr = read(backward.dkr);
  return r;
}

/// Relative L2 distance; infinite when sizes differ or a number is not finite where the reference
/// is.
inline double distance(const Values& got, const Values& want) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) {
      norm += std::isfinite(want[i]) ? want[i] * want[i] : 0;
      continue;
    }
    if (!std::isfinite(got[i]) || !std::isfinite(want[i]))
      return std::numeric_limits<double>::infinity();
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace moesaic::attention_test
