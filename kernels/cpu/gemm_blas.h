#pragma once
// Products that the BLAS library computes: sums over tokens (a transposed), which weight gradients are.
//
// The others are not the library's, because a row of theirs is a token, which must keep its bits wherever it stands in the
// batch. The library does not grant that, with fixed tiles neither: in a tile of equal rows, OpenBLAS 0.3.21 gives rows
// 0-5 of each twelve other bits than rows 6-11 (sgemm on processors without AVX-512), and the last rows of a tile that is
// no multiple of 24 rows other bits than the rest (dgemm with AVX-512).
#include "kernels/ops/gemm.h"

namespace moesaic::cpu {

/// Whether the library computes this product. Rows and columns are features then, so m may have a say.
bool blas_takes(const Gemm& op);

/// Enqueues the product as calls of the library on tiles of c of a fixed size, on one thread each.
void launch_blas_gemm(CpuContext& context, const Gemm& op);

}  // namespace moesaic::cpu
