#pragma once
// Memory of the KDA chunk kernels: everything of one chunk of one head, in the accumulation type,
// padded with zeros to whole tiles of 16 tokens and to multiples of 8 channels.
#include <cstdint>

#include "kernels/cpu/kda_tile.h"

namespace moesaic::cpu {

struct KdaSizes {
  std::int64_t K, V;    ///< as given
  std::int64_t Kp, Vp;  ///< rounded up to multiples of 8
  std::int64_t ldk,
      ldv;  ///< distance of rows; never a multiple of 32, so that columns spread over the cache
  std::int64_t C, ldc;  ///< tokens of a full chunk

  KdaSizes(std::int64_t key_dim, std::int64_t value_dim, std::int64_t chunk_size)
      : K(key_dim),
        V(value_dim),
        Kp(round_up(K)),
        Vp(round_up(V)),
        ldk(spread(Kp)),
        ldv(spread(Vp)),
        C(chunk_size),
        ldc(spread(C)) {}
  std::int64_t num_chunks(std::int64_t tokens) const { return (tokens + C - 1) / C; }
  std::int64_t record_numel() const { return Kp * ldv + C * ldv + 2 * C * C + C * kKdaTile; }

 private:
  static std::int64_t round_up(std::int64_t n) { return (n + 7) / 8 * 8; }
  static std::int64_t spread(std::int64_t n) { return n % 32 == 0 ? n + 8 : n; }
};

/// What backward needs of a chunk's forward (SPEC 1.4 names).
template <class A>
struct KdaRecord {
  A* s;        ///< [Kp, ldv] state on entry
  A* w;        ///< [C, ldv]  R - A U, so that U = diag(beta) W
  A* a;        ///< [C, C]    lower tiles only
  A* p;        ///< [C, C]
  A* inverse;  ///< [C, 16]   per tile (I + A diag(beta))^-1

  KdaRecord(const KdaSizes& n, A* base)
      : s(base),
        w(s + n.Kp * n.ldv),
        a(w + n.C * n.ldv),
        p(a + n.C * n.C),
        inverse(p + n.C * n.C) {}
};

/// Hands out consecutive pieces of one block; with a null block it only counts.
template <class A>
class Carver {
 public:
  explicit Carver(A* base) : base_(base) {}
  A* take(std::int64_t n) {
    A* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (n + 15) / 16 * 16;
    return piece;
  }
  std::int64_t used() const { return used_; }

 private:
  A* base_;
  std::int64_t used_ = 0;
};

/// Operands of one chunk. `first` = decay from the tile's start (inclusive), `rest` = decay from
/// the token (exclusive) to the tile's end; `tile`, `before`, `after` = decay over a tile, over all
/// tiles before and after it.
template <class A>
struct KdaChunkData {
  A *q, *k, *alpha, *first, *rest;  // [C, ldk]
  A *q_row, *k_row, *q_hat,
      *k_hat;  // [C, ldk]; rows scaled from the tile's start, from the chunk's start
  A *v, *u;    // [C, ldv]
  A *tile, *before, *after, *total;  // [C / 16, ldk]; total [ldk]
  A* beta;                           // [C]
  A* decayed;                        // [16, ldk]
  A* k_columns;  // [Kp, ldc] keys as columns, scaled to the start of the tile at hand
  std::int64_t tokens = 0, rows = 0;  // in this chunk; rounded up to whole tiles

  KdaChunkData(const KdaSizes& n, Carver<A>& carver) {
    for (A** p : {&q, &k, &alpha, &first, &rest, &q_row, &k_row, &q_hat, &k_hat})
      *p = carver.take(n.C * n.ldk);
    for (A** p : {&v, &u})
      *p = carver.take(n.C * n.ldv);
    for (A** p : {&tile, &before, &after})
      *p = carver.take(n.C / kKdaTile * n.ldk);
    total = carver.take(n.ldk);
    beta = carver.take(n.C);
    decayed = carver.take(kKdaTile * n.ldk);
    k_columns = carver.take(n.Kp * n.ldc);
  }
  std::int64_t tiles() const { return rows / kKdaTile; }
};

/// Gradients of one chunk.
template <class A>
struct KdaChunkGradients {
  A *d_o, *du, *y;             // [C, ldv]; du becomes dR
  A* u_columns;                // [Vp, ldc]
  A *s_columns, *ds_columns;   // [Vp, ldk]
  A* ds;                       // [Kp, ldv]
  A *dp, *da;                  // [C, C]
  A *dq, *krow, *kcol, *keys;  // [C, ldk]
  A* dbeta;                    // [C]
  A* d_total;                  // [ldk] gradient of the log of the whole chunk's decay
  A* inverse;                  // [16, 16]

  KdaChunkGradients(const KdaSizes& n, Carver<A>& carver) {
    for (A** p : {&d_o, &du, &y})
      *p = carver.take(n.C * n.ldv);
    u_columns = carver.take(n.Vp * n.ldc);
    for (A** p : {&s_columns, &ds_columns})
      *p = carver.take(n.Vp * n.ldk);
    ds = carver.take(n.Kp * n.ldv);
    for (A** p : {&dp, &da})
      *p = carver.take(n.C * n.C);
    for (A** p : {&dq, &krow, &kcol, &keys})
      *p = carver.take(n.C * n.ldk);
    dbeta = carver.take(n.C);
    d_total = carver.take(n.ldk);
    inverse = carver.take(kKdaTile * kKdaTile);
  }
};

}  // namespace moesaic::cpu
