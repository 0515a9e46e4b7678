// A pair of blocks (a cluster) takes 256 rows of a result, 128 each, and the same columns; each loads half of the columns'
// operand for both (grouped_ring.cuh). A symmetric result has square tiles of 256 x 256 for the pair: only those on and above
// the diagonal are formed, and what lies above is written a second time, transposed. stmatrix transposes on the way to
// shared memory, from where whole segments of rows are stored.
//
// The old values that are added (beta) come straight to registers: those of a piece of 32 columns are asked for while the
// piece before it is written, the first ones before the products.
#include "kernels/cuda/grouped_ring.cuh"
#include "kernels/cuda/schulz_products.h"
#include "kernels/cuda/tensor_map.h"

namespace moesaic::cuda {
namespace {

constexpr int kSide = kCluster * kTileM;  // 256: rows of a pair's tile
constexpr int kMaxColumns = 256;
constexpr int kMaxSums = kMaxColumns / 2;
constexpr int kPiece = 32;  // columns that go through shared memory at a time
constexpr int kStraightBytes = 64 * kPiece * 2, kMirrorBytes = kPiece * kRowBytes;
constexpr int kBufferBytes = kStraightBytes + kMirrorBytes;
constexpr int kStaging = kConsumers * 2 * kBufferBytes;
constexpr int kBytesColumns = kMaxColumns * kRowBytes;
constexpr RingShape kShape = ring_shape(kMaxColumns, kStaging);

struct Maps {
  CUtensorMap rows, columns;
};
struct Args {
  __nv_bfloat16* d;
  const __nv_bfloat16* c;  // null: nothing is added
  std::int32_t m, n;       // of a result
  std::int32_t blocks;     // of 64 terms of the sums
  std::int32_t across, down;
  std::int32_t per_matrix;  // units
  std::int32_t units;
  float alpha, beta;
  RingShape shape;
};

struct Unit {
  std::int32_t matrix, row, column;  // first of the block's tile
  bool mirrored;
};

template <bool kSymmetric, int N>
__device__ __forceinline__ Unit unit_at(const Args& args, int unit, int rank) {
  const int matrix = unit / args.per_matrix;
  int local = unit - matrix * args.per_matrix;
  if constexpr (kSymmetric) {
    int i = 0;
    for (int width = args.across; local >= width; --width, ++i)
      local -= width;
    return {matrix, i * kSide + rank * kTileM, (i + local) * kSide, local > 0};
  } else {
    return {matrix, local % args.down * kSide + rank * kTileM, local / args.down * N, false};
  }
}

// One thread. The columns' operand: rows of k (symmetric: the matrix itself), or transposed.
template <bool kSymmetric, int N>
__device__ void produce(const Maps& maps, const Args& args, const Ring& ring, int rank) {
  RingPosition at;
  for (int u = cluster_index(); u < args.units; u += num_clusters()) {
    const Unit unit = unit_at<kSymmetric, N>(args, u, rank);
    for (int b = 0; b < args.blocks; ++b, at.advance(ring)) {
      std::uint64_t* const full = ring.full + at.stage;
      unsigned char* const stage = ring.stage(at.stage);
      unsigned char* const columns = stage + kBytesM + rank * (kBytesColumns / kCluster);
      mbarrier_wait(ring.empty + at.stage, at.phase ^ 1U);
      mbarrier_arrive_expect(full, kBytesM + kBytesColumns);
      tma_load_3d(stage, &maps.rows, full, b * kBlockK, unit.row, unit.matrix);
      if constexpr (kSymmetric) {
        tma_load_3d_multicast(columns,
                              &maps.columns,
                              full,
                              b * kBlockK,
                              unit.column + rank * (kMaxColumns / kCluster),
                              unit.matrix,
                              kBothBlocks);
      } else {
        constexpr int kTiles = kMaxColumns / 64 / kCluster;
        for (int i = 0; i < kTiles; ++i) {
          tma_load_3d_multicast(columns + i * kAtomTile,
                                &maps.columns,
                                full,
                                unit.column + (rank * kTiles + i) * 64,
                                b * kBlockK,
                                unit.matrix,
                                kBothBlocks);
        }
      }
    }
  }
}

__device__ __forceinline__ std::uint32_t swizzled_64(std::uint32_t offset) {
  return offset ^ ((offset >> 3) & 0x30U);
}

// Stores `rows` x `columns` elements (whole 16 bytes) of a buffer with rows of kRowLength bytes.
template <int kRowLength, int kRows>
__device__ __forceinline__ void store_piece(
    const unsigned char* buffer, __nv_bfloat16* to, std::int64_t pitch, int rows, int columns) {
  constexpr int kAcross = kRowLength / 16;
#pragma unroll
  for (int i = 0; i < kRows * kAcross / kGroupThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) % kGroupThreads + i * kGroupThreads;
    const int row = index / kAcross, part = index % kAcross;
    if (row >= rows || part * 8 >= columns) continue;
    const auto offset = static_cast<std::uint32_t>(row * kRowLength + part * 16);
    *reinterpret_cast<uint4*>(to + row * pitch + part * 8) = *reinterpret_cast<const uint4*>(
        buffer + (kRowLength == 128 ? swizzled_128(offset) : swizzled_64(offset)));
  }
}

// A thread's part of a piece: 8 pairs per half of the warp's 16 rows.
struct Old {
  std::uint32_t pair[kPiece / 8][2];
};

struct Place {
  std::int64_t base;  // of the matrix
  int row, column;    // of the warpgroup's 64 rows, of the tile
  int lane, warp;
};

__device__ __forceinline__ void ask_old(Old& old, const Args& args, const Place& p, int piece) {
#pragma unroll
  for (int j = 0; j < kPiece / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = p.row + p.warp * 16 + h * 8 + p.lane / 4;
      const int column = p.column + piece * kPiece + j * 8 + p.lane % 4 * 2;
      old.pair[j][h] = row < args.m && column < args.n
                           ? __ldg(reinterpret_cast<const unsigned*>(
                                 args.c + p.base + std::int64_t{row} * args.n + column))
                           : 0U;
    }
  }
}

// The sums of a warpgroup to the result, pieces of 32 columns. Two buffers alternate, so one barrier per piece is enough.
template <bool kSymmetric, int N>
__device__ __forceinline__ void write_result(const float (&d)[kMaxSums],
                                             const Args& args,
                                             const Place& p,
                                             Old& old,
                                             bool mirrored,
                                             int group,
                                             unsigned char* staging,
                                             int& buffer) {
  const int lane = p.lane, warp = p.warp;
  const auto straight_at = static_cast<std::uint32_t>(
      (warp * 16 + lane / 8 % 2 * 8 + lane % 8) * (kPiece * 2) + lane / 16 * 16);
  const auto mirror_at = static_cast<std::uint32_t>((lane / 16 * 8 + lane % 8) * kRowBytes +
                                                    warp * 32 + lane / 8 % 2 * 16);
#pragma unroll
  for (int c = 0; c < N; c += kPiece) {
    unsigned char* const straight = staging + buffer * kBufferBytes;
    unsigned char* const mirror = straight + kStraightBytes;
    buffer ^= 1;
    const Old now = old;
    if (args.c != nullptr && c + kPiece < N) ask_old(old, args, p, c / kPiece + 1);
#pragma unroll
    for (int j = 0; j < kPiece / 8; j += 2) {
      if (c + j * 8 >= N) continue;
      std::uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // h = i % 2, columns j + i / 2
        const int at = c / 2 + 4 * (j + i / 2) + 2 * (i % 2);
        const std::uint32_t pair = now.pair[j + i / 2][i % 2];
        float low = args.alpha * d[at], high = args.alpha * d[at + 1];
        if (args.c != nullptr) {
          low = fmaf(args.beta, __uint_as_float(pair << 16), low);
          high = fmaf(args.beta, __uint_as_float(pair & 0xffff0000U), high);
        }
        packed[i] = pack_bf16(low, high);
      }
      stmatrix_x4(straight + swizzled_64(straight_at + static_cast<std::uint32_t>(j * 16)), packed);
      if (kSymmetric && mirrored) {
        stmatrix_x4_trans(
            mirror + swizzled_128(mirror_at + static_cast<std::uint32_t>(j * 8 * kRowBytes)),
            packed);
      }
    }
    named_barrier_sync(1 + group, kGroupThreads);
    const int rows = args.m - p.row, columns = min(N - c, args.n - p.column - c);
    __nv_bfloat16* const to = args.d + p.base;
    store_piece<kPiece * 2, 64>(straight,
                                to + std::int64_t{p.row} * args.n + p.column + c,
                                args.n,
                                rows,
                                min(columns, kPiece));
    if (kSymmetric && mirrored) {
      store_piece<kRowBytes, kPiece>(
          mirror, to + std::int64_t{p.column + c} * args.n + p.row, args.n, columns, rows);
    }
  }
}

template <bool kSymmetric, int N>
__device__ void consume(const Args& args, const Ring& ring, int rank, int group) {
  unsigned char* const staging = ring.stage(ring.shape.stages) + group * 2 * kBufferBytes;
  const auto nothing = [](int, unsigned char*) {};
  RingPosition at;
  int buffer = 0;
  for (int u = cluster_index(); u < args.units; u += num_clusters()) {
    const Unit unit = unit_at<kSymmetric, N>(args, u, rank);
    const Place place{std::int64_t{unit.matrix} * args.m * args.n,
                      unit.row + group * 64,
                      unit.column,
                      static_cast<int>(threadIdx.x) % 32,
                      static_cast<int>(threadIdx.x) % kGroupThreads / 32};
    Old old{};
    if (args.c != nullptr) ask_old(old, args, place, 0);
    float d[kMaxSums];
    multiply<Major::k, kSymmetric ? Major::k : Major::mn, N>(
        d, ring, at, args.blocks, group, nothing);
    write_result<kSymmetric, N>(d, args, place, old, unit.mirrored, group, staging, buffer);
  }
}

template <bool kSymmetric, int N>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps maps, const Args args) {
  __shared__ std::uint64_t barriers[2 * kMaxStages];
  const Ring ring = make_ring(barriers, args.shape);
  const int rank = static_cast<int>(cluster_rank());
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == kConsumers) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupThreads) produce<kSymmetric, N>(maps, args, ring, rank);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume<kSymmetric, N>(args, ring, rank, group);
  }
  cluster_sync();  // the other block may still write to this one's shared memory
}

template <bool kSymmetric, int N>
void launch_product(CudaContext& context, const Maps& maps, const Args& args) {
  const auto kernel = product_kernel<kSymmetric, N>;
  const int shared = kShape.bytes() + kStaging;
  allow_shared(kernel, shared);
  kernel<<<persistent_grid(context, args.units), kThreads, shared, native_stream(context)>>>(maps,
                                                                                             args);
  check_launch("schulz_products");
}

CUtensorMap map_of(const ConstTensorView& v, std::int64_t box_columns, std::int64_t box_rows) {
  const std::int64_t rows = v.dim(1), columns = v.dim(2);
  return make_tensor_map(v.data(),
                         DType::bf16,
                         {.sizes = {columns, rows, v.dim(0)},
                          .strides = {columns, rows * columns},
                          .box = {box_columns, box_rows, 1}});
}

std::int64_t pieces(std::int64_t n, std::int64_t piece) {
  return (n + piece - 1) / piece;
}
// Columns of a tile: as few tiles as with 256, but no wider than needed.
std::int64_t tile_columns(std::int64_t n) {
  constexpr std::int64_t kStep = 16, kLeast = 128;
  const std::int64_t each = pieces(n, pieces(n, kMaxColumns));
  return std::max(kLeast, pieces(each, kStep) * kStep);
}
std::int64_t symmetric_units(std::int64_t m) {
  const std::int64_t across = pieces(m, kSide);
  return across * (across + 1) / 2;
}
std::int64_t wide_units(std::int64_t m, std::int64_t n) {
  return pieces(m, kSide) * pieces(n, tile_columns(n));
}

}  // namespace

bool can_multiply_schulz(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kMostRows = 16384;  // units and rows are counted in 32 bits
  return rows >= kSide && rows <= kMostRows && rows % 8 == 0 && cols % 8 == 0 &&
         cols < (std::int64_t{1} << 24);
}

std::int64_t schulz_group(const CudaContext& context,
                          std::int64_t rows,
                          std::int64_t cols,
                          std::int64_t total,
                          std::int64_t most) {
  most = std::min(most, total);
  const std::int64_t clusters = std::max(1, context.num_sms / kCluster);
  // Time of `count` matrices: rounds of the clusters, weighted by the terms of a tile's sums.
  const auto time = [&](std::int64_t count) {
    return pieces(count * symmetric_units(rows), clusters) * (cols + rows) +
           pieces(count * wide_units(rows, cols), clusters) * rows;
  };
  std::int64_t best = most, least = 0;
  for (std::int64_t g = most; g >= std::max<std::int64_t>(1, most / 2); --g) {
    const std::int64_t all = total / g * time(g) + time(total % g);
    if (g == most || all < least) {
      least = all;
      best = g;
    }
  }
  return best;
}

void multiply_symmetric(CudaContext& context,
                        const TensorView& d,
                        const ConstTensorView& a,
                        const ConstTensorView& c,
                        double alpha,
                        double beta,
                        std::int64_t count) {
  const std::int64_t m = a.dim(1), across = pieces(m, kSide), units = symmetric_units(m);
  const Maps maps{map_of(a, kBlockK, kTileM), map_of(a, kBlockK, kMaxColumns / kCluster)};
  const Args args{.d = reinterpret_cast<__nv_bfloat16*>(d.data()),
                  .c = reinterpret_cast<const __nv_bfloat16*>(c.data()),
                  .m = static_cast<std::int32_t>(m),
                  .n = static_cast<std::int32_t>(m),
                  .blocks = static_cast<std::int32_t>(pieces(a.dim(2), kBlockK)),
                  .across = static_cast<std::int32_t>(across),
                  .down = static_cast<std::int32_t>(across),
                  .per_matrix = static_cast<std::int32_t>(units),
                  .units = static_cast<std::int32_t>(units * count),
                  .alpha = static_cast<float>(alpha),
                  .beta = static_cast<float>(beta),
                  .shape = kShape};
  launch_product<true, kMaxColumns>(context, maps, args);
}

void multiply_wide(CudaContext& context,
                   const TensorView& d,
                   const ConstTensorView& p,
                   const ConstTensorView& x,
                   double beta,
                   std::int64_t count) {
  const std::int64_t m = x.dim(1), n = x.dim(2), width = tile_columns(n);
  const std::int64_t across = pieces(n, width), units = wide_units(m, n);
  const Maps maps{map_of(p, kBlockK, kTileM), map_of(x, 64, kBlockK)};
  const Args args{.d = reinterpret_cast<__nv_bfloat16*>(d.data()),
                  .c = reinterpret_cast<const __nv_bfloat16*>(x.data()),
                  .m = static_cast<std::int32_t>(m),
                  .n = static_cast<std::int32_t>(n),
                  .blocks = static_cast<std::int32_t>(pieces(m, kBlockK)),
                  .across = static_cast<std::int32_t>(across),
                  .down = static_cast<std::int32_t>(pieces(m, kSide)),
                  .per_matrix = static_cast<std::int32_t>(units),
                  .units = static_cast<std::int32_t>(units * count),
                  .alpha = 1,
                  .beta = static_cast<float>(beta),
                  .shape = kShape};
  switch (width) {
#define MOESAIC_WIDTH(N) \
  case N:                \
    return launch_product<false, N>(context, maps, args);
    MOESAIC_WIDTH(128)
    MOESAIC_WIDTH(144)
    MOESAIC_WIDTH(160)
    MOESAIC_WIDTH(176)
    MOESAIC_WIDTH(192)
    MOESAIC_WIDTH(208)
    MOESAIC_WIDTH(224)
    MOESAIC_WIDTH(240)
    MOESAIC_WIDTH(256)
#undef MOESAIC_WIDTH
    default:
      throw InternalError("schulz_products: a tile width without kernel");
  }
}

}  // namespace moesaic::cuda
