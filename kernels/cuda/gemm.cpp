// Gemm through cublasLt. The library is column-major, so it is asked for c^T = op(b)^T op(a)^T: a
// row-major matrix is its own transpose there, and no operand needs another flag than the one
// given.
#include "kernels/ops/gemm.h"

#include <array>

#include "kernels/cuda/blas_lt.h"
#include "kernels/cuda/launch.h"

namespace moesaic {
namespace {

using cuda::BlasLt;
using cuda::GemmKey;

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;
constexpr std::uint32_t kMaxAlignment = 256;
constexpr int kMaxProposals = 8;

using MatmulDesc = Owned<cublasLtMatmulDesc_t, &cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, &cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, &cublasLtMatmulPreferenceDestroy>;

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      throw InternalError(std::string("gemm has no CUDA kernel for ") + name(dtype));
  }
}

Layout make_layout(const ConstTensorView& view) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto rows = static_cast<std::uint64_t>(view.dim(1)),
             columns = static_cast<std::uint64_t>(view.dim(0));
  MOESAIC_BLAS_CALL(
      cublasLtMatrixLayoutCreate(&layout, data_type(view.dtype()), rows, columns, view.dim(1)));
  return Layout(layout);
}

// f64 in f64; f32 and bf16 in f32. CUBLAS_COMPUTE_32F is plain f32: TF32 has a compute type of its
// own.
MatmulDesc make_product(const Gemm& op) {
  const bool f64 = op.a.dtype() == DType::f64;
  cublasLtMatmulDesc_t product = nullptr;
  MOESAIC_BLAS_CALL(cublasLtMatmulDescCreate(
      &product, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, f64 ? CUDA_R_64F : CUDA_R_32F));
  MatmulDesc owner(product);
  const auto set_transpose = [product](cublasLtMatmulDescAttributes_t attribute, bool transpose) {
    const cublasOperation_t value = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    MOESAIC_BLAS_CALL(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)));
  };
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSA, op.transpose_b);
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSB, op.transpose_a);
  return owner;
}

std::uint32_t alignment(const void* p) {
  std::uint32_t bytes = kMaxAlignment;
  while (!cuda::is_aligned(p, bytes))
    bytes /= 2;
  return bytes;
}

GemmKey key_of(const Gemm& op) {
  return {.m = op.m(),
          .n = op.n(),
          .k = op.k(),
          .transpose_a = op.transpose_a,
          .transpose_b = op.transpose_b,
          .accumulate = op.accumulate,
          .input = op.a.dtype(),
          .output = op.c.dtype(),
          .align_a = alignment(op.a.data()),
          .align_b = alignment(op.b.data()),
          .align_c = alignment(op.c.data())};
}

struct Problem {
  MatmulDesc product;
  Layout a, b, c;  // as the op names them; cublasLt gets b first
};

Preference make_preference(const GemmKey& key) {
  cublasLtMatmulPreference_t preference = nullptr;
  MOESAIC_BLAS_CALL(cublasLtMatmulPreferenceCreate(&preference));
  Preference owner(preference);
  const auto set = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    MOESAIC_BLAS_CALL(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_c);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_c);
  return owner;
}

bool splits_k(const cublasLtMatmulAlgo_t& algorithm) {
  std::int32_t parts = 0;
  std::size_t written = 0;
  MOESAIC_BLAS_CALL(cublasLtMatmulAlgoConfigGetAttribute(
      &algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &written));
  return parts > 1;
}

// The heuristic's best algorithm that forms every sum in one go: with split sums, which part
// arrives first could decide the bits.
cublasLtMatmulAlgo_t choose(BlasLt& blas, const Problem& p, const GemmKey& key) {
  const auto known = blas.choices.find(key);
  if (known != blas.choices.end()) return known->second;
  const Preference preference = make_preference(key);
  std::array<cublasLtMatmulHeuristicResult_t, kMaxProposals> proposals{};
  int found = 0;
  MOESAIC_BLAS_CALL(cublasLtMatmulAlgoGetHeuristic(blas.handle.get(),
                                                   p.product.get(),
                                                   p.b.get(),
                                                   p.a.get(),
                                                   p.c.get(),
                                                   p.c.get(),
                                                   preference.get(),
                                                   kMaxProposals,
                                                   proposals.data(),
                                                   &found));
  for (int i = 0; i < found; ++i) {
    const auto& proposal = proposals[static_cast<std::size_t>(i)];
    if (proposal.state == CUBLAS_STATUS_SUCCESS && !splits_k(proposal.algo)) {
      blas.choices.emplace(key, proposal.algo);
      return proposal.algo;
    }
  }
  throw InternalError("cublasLt offers no algorithm without split sums for " +
                      std::to_string(key.m) + " x " + std::to_string(key.n) + " x " +
                      std::to_string(key.k) + " " + name(key.input));
}

template <class Scale>
void multiply(CudaContext& context, const Gemm& op, TensorView workspace) {
  auto& blas = *static_cast<BlasLt*>(context.blas_lt);
  const Problem p{make_product(op), make_layout(op.a), make_layout(op.b), make_layout(op.c)};
  const auto algorithm = choose(blas, p, key_of(op));
  const auto alpha = static_cast<Scale>(op.alpha), beta = static_cast<Scale>(op.accumulate ? 1 : 0);
  MOESAIC_BLAS_CALL(cublasLtMatmul(blas.handle.get(),
                                   p.product.get(),
                                   &alpha,
                                   op.b.data(),
                                   p.b.get(),
                                   op.a.data(),
                                   p.a.get(),
                                   &beta,
                                   op.c.data(),
                                   p.c.get(),
                                   op.c.data(),
                                   p.c.get(),
                                   &algorithm,
                                   workspace.data(),
                                   workspace.bytes(),
                                   cuda::native_stream(context)));
}

}  // namespace

void launch(CudaContext& context, const Gemm& op) {
  if (op.c.numel() == 0) return;
  if (op.k() == 0) {
    if (!op.accumulate) zero_tensor(op.c, context.stream);
    return;
  }
  const Arena::Mark mark(context.scratch);
  const TensorView workspace = context.scratch.take({kWorkspaceBytes}, DType::u8, "gemm.workspace");
  if (cuda::is_dry(context)) return;
  cuda::use_device(context.stream.device());
  if (op.a.dtype() == DType::f64) return multiply<double>(context, op, workspace);
  multiply<float>(context, op, workspace);
}

}  // namespace moesaic
