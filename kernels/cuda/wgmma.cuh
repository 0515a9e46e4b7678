#pragma once
// wgmma: products of a warpgroup (128 consecutive threads, first warp index divisible by 4), bf16 operands, f32 sums,
// m64 nN k16 for N = 8, 16, ... 256. Use:
//
//   wgmma_fence();                                  // accumulators (and A registers) have been written before
//   for each k16: wgmma_ss<kMajor, kMajor>(d, a_descriptor, b_descriptor, accumulate);
//   wgmma_commit();
//   wgmma_wait<0>();                                // before anybody reads d, or writes what the products read
//
// d is float[N / 2] per thread; with w = warp of the warpgroup, g = lane / 4, q = lane % 4, element
// d[4 j + 2 h + i] is (row 16 w + g + 8 h, column 8 j + 2 q + i). A registers of the RS form: as a of mma_bf16 (ptx.cuh),
// rows 16 w ... 16 w + 15. An accumulator array of another N picks another overload.
#include <cstdint>

#include "kernels/cuda/ptx.cuh"

namespace moesaic::cuda {

/// How an operand lies in shared memory. kMajor: rows of M (or N), each 64 k = 128 bytes. mnMajor ("transposed"): rows of k,
/// each 64 M (or N) = 128 bytes.
enum class Major : int { k = 0, mn = 1 };

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits for all but the last N committed groups.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/// Stops the compiler from moving accesses of d over this point.
template <int N>
__device__ __forceinline__ void pin_registers(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(d[i])::"memory");
}

/// Descriptor of a tile with 128-byte swizzle, as TMA writes it (box of 64 bf16 in the inner dimension), 1024-byte aligned.
///   kMajor:   8 rows of 128 bytes are an atom, atoms of rows follow each other (stride 1024). The next k16 inside the 64 k is
///             32 bytes on: descriptor + 2.
///   mnMajor:  8 k of 64 M (N) elements are an atom, atoms of k follow each other (stride 1024). The next k16 is 2048 bytes
///             on: descriptor + 128. `mn_stride` is the distance in bytes of the next 64 M (N): 128 x the tile's k.
template <Major Order>
__device__ __forceinline__ std::uint64_t swizzled_descriptor(const void* tile,
                                                             std::uint32_t mn_stride = 16) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kAtomStride = std::uint64_t{1024 / 16} << 32;
  const std::uint64_t address = (shared_address(tile) & 0x3ffffU) >> 4;
  const std::uint64_t leading = Order == Major::k ? 1 : mn_stride / 16;
  return kSwizzle128 | kAtomStride | leading << 16 | address;
}
/// Added to a descriptor: `bytes` (a multiple of 16) further on.
constexpr std::uint64_t descriptor_step(std::uint32_t bytes) {
  return bytes / 16;
}
/// The byte offset inside a swizzled tile of 128-byte rows of what lies at `offset` unswizzled.
__device__ __forceinline__ std::uint32_t swizzled_128(std::uint32_t offset) {
  return offset ^ ((offset >> 3) & 0x70U);
}

// clang-format off
// Accumulators i .. i + 3 as operands and as names, and the lists of the first N / 2.
#define MOESAIC_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOESAIC_OUT_8 MOESAIC_D4(0)
#define MOESAIC_OUT_16 MOESAIC_OUT_8, MOESAIC_D4(4)
#define MOESAIC_OUT_24 MOESAIC_OUT_16, MOESAIC_D4(8)
#define MOESAIC_OUT_32 MOESAIC_OUT_24, MOESAIC_D4(12)
#define MOESAIC_OUT_40 MOESAIC_OUT_32, MOESAIC_D4(16)
#define MOESAIC_OUT_48 MOESAIC_OUT_40, MOESAIC_D4(20)
#define MOESAIC_OUT_56 MOESAIC_OUT_48, MOESAIC_D4(24)
#define MOESAIC_OUT_64 MOESAIC_OUT_56, MOESAIC_D4(28)
#define MOESAIC_OUT_72 MOESAIC_OUT_64, MOESAIC_D4(32)
#define MOESAIC_OUT_80 MOESAIC_OUT_72, MOESAIC_D4(36)
#define MOESAIC_OUT_88 MOESAIC_OUT_80, MOESAIC_D4(40)
#define MOESAIC_OUT_96 MOESAIC_OUT_88, MOESAIC_D4(44)
#define MOESAIC_OUT_104 MOESAIC_OUT_96, MOESAIC_D4(48)
#define MOESAIC_OUT_112 MOESAIC_OUT_104, MOESAIC_D4(52)
#define MOESAIC_OUT_120 MOESAIC_OUT_112, MOESAIC_D4(56)
#define MOESAIC_OUT_128 MOESAIC_OUT_120, MOESAIC_D4(60)
#define MOESAIC_OUT_136 MOESAIC_OUT_128, MOESAIC_D4(64)
#define MOESAIC_OUT_144 MOESAIC_OUT_136, MOESAIC_D4(68)
#define MOESAIC_OUT_152 MOESAIC_OUT_144, MOESAIC_D4(72)
#define MOESAIC_OUT_160 MOESAIC_OUT_152, MOESAIC_D4(76)
#define MOESAIC_OUT_168 MOESAIC_OUT_160, MOESAIC_D4(80)
#define MOESAIC_OUT_176 MOESAIC_OUT_168, MOESAIC_D4(84)
#define MOESAIC_OUT_184 MOESAIC_OUT_176, MOESAIC_D4(88)
#define MOESAIC_OUT_192 MOESAIC_OUT_184, MOESAIC_D4(92)
#define MOESAIC_OUT_200 MOESAIC_OUT_192, MOESAIC_D4(96)
#define MOESAIC_OUT_208 MOESAIC_OUT_200, MOESAIC_D4(100)
#define MOESAIC_OUT_216 MOESAIC_OUT_208, MOESAIC_D4(104)
#define MOESAIC_OUT_224 MOESAIC_OUT_216, MOESAIC_D4(108)
#define MOESAIC_OUT_232 MOESAIC_OUT_224, MOESAIC_D4(112)
#define MOESAIC_OUT_240 MOESAIC_OUT_232, MOESAIC_D4(116)
#define MOESAIC_OUT_248 MOESAIC_OUT_240, MOESAIC_D4(120)
#define MOESAIC_OUT_256 MOESAIC_OUT_248, MOESAIC_D4(124)
#define MOESAIC_REG_8 "%0, %1, %2, %3"
#define MOESAIC_REG_16 MOESAIC_REG_8 ", %4, %5, %6, %7"
#define MOESAIC_REG_24 MOESAIC_REG_16 ", %8, %9, %10, %11"
#define MOESAIC_REG_32 MOESAIC_REG_24 ", %12, %13, %14, %15"
#define MOESAIC_REG_40 MOESAIC_REG_32 ", %16, %17, %18, %19"
#define MOESAIC_REG_48 MOESAIC_REG_40 ", %20, %21, %22, %23"
#define MOESAIC_REG_56 MOESAIC_REG_48 ", %24, %25, %26, %27"
#define MOESAIC_REG_64 MOESAIC_REG_56 ", %28, %29, %30, %31"
#define MOESAIC_REG_72 MOESAIC_REG_64 ", %32, %33, %34, %35"
#define MOESAIC_REG_80 MOESAIC_REG_72 ", %36, %37, %38, %39"
#define MOESAIC_REG_88 MOESAIC_REG_80 ", %40, %41, %42, %43"
#define MOESAIC_REG_96 MOESAIC_REG_88 ", %44, %45, %46, %47"
#define MOESAIC_REG_104 MOESAIC_REG_96 ", %48, %49, %50, %51"
#define MOESAIC_REG_112 MOESAIC_REG_104 ", %52, %53, %54, %55"
#define MOESAIC_REG_120 MOESAIC_REG_112 ", %56, %57, %58, %59"
#define MOESAIC_REG_128 MOESAIC_REG_120 ", %60, %61, %62, %63"
#define MOESAIC_REG_136 MOESAIC_REG_128 ", %64, %65, %66, %67"
#define MOESAIC_REG_144 MOESAIC_REG_136 ", %68, %69, %70, %71"
#define MOESAIC_REG_152 MOESAIC_REG_144 ", %72, %73, %74, %75"
#define MOESAIC_REG_160 MOESAIC_REG_152 ", %76, %77, %78, %79"
#define MOESAIC_REG_168 MOESAIC_REG_160 ", %80, %81, %82, %83"
#define MOESAIC_REG_176 MOESAIC_REG_168 ", %84, %85, %86, %87"
#define MOESAIC_REG_184 MOESAIC_REG_176 ", %88, %89, %90, %91"
#define MOESAIC_REG_192 MOESAIC_REG_184 ", %92, %93, %94, %95"
#define MOESAIC_REG_200 MOESAIC_REG_192 ", %96, %97, %98, %99"
#define MOESAIC_REG_208 MOESAIC_REG_200 ", %100, %101, %102, %103"
#define MOESAIC_REG_216 MOESAIC_REG_208 ", %104, %105, %106, %107"
#define MOESAIC_REG_224 MOESAIC_REG_216 ", %108, %109, %110, %111"
#define MOESAIC_REG_232 MOESAIC_REG_224 ", %112, %113, %114, %115"
#define MOESAIC_REG_240 MOESAIC_REG_232 ", %116, %117, %118, %119"
#define MOESAIC_REG_248 MOESAIC_REG_240 ", %120, %121, %122, %123"
#define MOESAIC_REG_256 MOESAIC_REG_248 ", %124, %125, %126, %127"

// P, A, B, ... are the operands' numbers after the accumulators.
#define MOESAIC_WGMMA(N, A0, A1, A2, A3, A4, A5, A6)                                                                      \
  template <Major A, Major B>                                                                                             \
  __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool accumulate) {        \
    asm volatile(                                                                                                         \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " A2 ", 0;\n"                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOESAIC_REG_##N "}, " A0 ", " A1                     \
        ", p, 1, 1, " A3 ", " A4 ";\n}\n"                                                                                \
        : MOESAIC_OUT_##N                                                                                                 \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A)), "n"(static_cast<int>(B)));         \
  }                                                                                                                       \
  template <Major B>                                                                                                      \
  __device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b,               \
                                           bool accumulate) {                                                             \
    asm volatile(                                                                                                         \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " A5 ", 0;\n"                                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOESAIC_REG_##N "}, {" A0 ", " A1 ", " A2 ", " A3    \
        "}, " A4 ", p, 1, 1, " A6 ";\n}\n"                                                                               \
        : MOESAIC_OUT_##N                                                                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),                          \
          "n"(static_cast<int>(B)));                                                                                      \
  }
MOESAIC_WGMMA(8, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
MOESAIC_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
MOESAIC_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
MOESAIC_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
MOESAIC_WGMMA(40, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
MOESAIC_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
MOESAIC_WGMMA(56, "%28", "%29", "%30", "%31", "%32", "%33", "%34")
MOESAIC_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
MOESAIC_WGMMA(72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
MOESAIC_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
MOESAIC_WGMMA(88, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
MOESAIC_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
MOESAIC_WGMMA(104, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
MOESAIC_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
MOESAIC_WGMMA(120, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
MOESAIC_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
MOESAIC_WGMMA(136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
MOESAIC_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
MOESAIC_WGMMA(152, "%76", "%77", "%78", "%79", "%80", "%81", "%82")
MOESAIC_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
MOESAIC_WGMMA(168, "%84", "%85", "%86", "%87", "%88", "%89", "%90")
MOESAIC_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
MOESAIC_WGMMA(184, "%92", "%93", "%94", "%95", "%96", "%97", "%98")
MOESAIC_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
MOESAIC_WGMMA(200, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
MOESAIC_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
MOESAIC_WGMMA(216, "%108", "%109", "%110", "%111", "%112", "%113", "%114")
MOESAIC_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
MOESAIC_WGMMA(232, "%116", "%117", "%118", "%119", "%120", "%121", "%122")
MOESAIC_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
MOESAIC_WGMMA(248, "%124", "%125", "%126", "%127", "%128", "%129", "%130")
MOESAIC_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef MOESAIC_WGMMA
#undef MOESAIC_OUT_8
#undef MOESAIC_OUT_16
#undef MOESAIC_OUT_24
#undef MOESAIC_OUT_32
#undef MOESAIC_OUT_40
#undef MOESAIC_OUT_48
#undef MOESAIC_OUT_56
#undef MOESAIC_OUT_64
#undef MOESAIC_OUT_72
#undef MOESAIC_OUT_80
#undef MOESAIC_OUT_88
#undef MOESAIC_OUT_96
#undef MOESAIC_OUT_104
#undef MOESAIC_OUT_112
#undef MOESAIC_OUT_120
#undef MOESAIC_OUT_128
#undef MOESAIC_OUT_136
#undef MOESAIC_OUT_144
#undef MOESAIC_OUT_152
#undef MOESAIC_OUT_160
#undef MOESAIC_OUT_168
#undef MOESAIC_OUT_176
#undef MOESAIC_OUT_184
#undef MOESAIC_OUT_192
#undef MOESAIC_OUT_200
#undef MOESAIC_OUT_208
#undef MOESAIC_OUT_216
#undef MOESAIC_OUT_224
#undef MOESAIC_OUT_232
#undef MOESAIC_OUT_240
#undef MOESAIC_OUT_248
#undef MOESAIC_OUT_256
#undef MOESAIC_REG_8
#undef MOESAIC_REG_16
#undef MOESAIC_REG_24
#undef MOESAIC_REG_32
#undef MOESAIC_REG_40
#undef MOESAIC_REG_48
#undef MOESAIC_REG_56
#undef MOESAIC_REG_64
#undef MOESAIC_REG_72
#undef MOESAIC_REG_80
#undef MOESAIC_REG_88
#undef MOESAIC_REG_96
#undef MOESAIC_REG_104
#undef MOESAIC_REG_112
#undef MOESAIC_REG_120
#undef MOESAIC_REG_128
#undef MOESAIC_REG_136
#undef MOESAIC_REG_144
#undef MOESAIC_REG_152
#undef MOESAIC_REG_160
#undef MOESAIC_REG_168
#undef MOESAIC_REG_176
#undef MOESAIC_REG_184
#undef MOESAIC_REG_192
#undef MOESAIC_REG_200
#undef MOESAIC_REG_208
#undef MOESAIC_REG_216
#undef MOESAIC_REG_224
#undef MOESAIC_REG_232
#undef MOESAIC_REG_240
#undef MOESAIC_REG_248
#undef MOESAIC_REG_256
#undef MOESAIC_D4
// clang-format on

}  // namespace moesaic::cuda
