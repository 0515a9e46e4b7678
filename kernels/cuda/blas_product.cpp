// cublasLt is column-major, so it is asked for d^T = op(b)^T op(a)^T: a row-major matrix is its own
// transpose there, and no operand needs another flag than the one given.
#include "kernels/cuda/blas_product.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "kernels/cuda/blas_lt.h"
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {
namespace {

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

Layout make_layout(DType dtype,
                   std::int64_t rows,
                   std::int64_t cols,
                   std::int64_t pitch,
                   std::int64_t batch,
                   std::int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  MOESAIC_BLAS_CALL(cublasLtMatrixLayoutCreate(&layout,
                                               data_type(dtype),
                                               static_cast<std::uint64_t>(cols),
                                               static_cast<std::uint64_t>(rows),
                                               pitch > 0 ? pitch : cols));
  Layout owner(layout);
  const auto set = [layout](cublasLtMatrixLayoutAttribute_t attribute, auto value) {
    MOESAIC_BLAS_CALL(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)));
  };
  if (batch > 1) {
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
  return owner;
}

// f64 in f64; f32 and bf16 in f32. CUBLAS_COMPUTE_32F is plain f32: TF32 has a compute type of its
// own.
MatmulDesc make_description(const BlasProduct& p) {
  const bool f64 = p.input == DType::f64;
  cublasLtMatmulDesc_t product = nullptr;
  MOESAIC_BLAS_CALL(cublasLtMatmulDescCreate(
      &product, f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, f64 ? CUDA_R_64F : CUDA_R_32F));
  MatmulDesc owner(product);
  const auto set_transpose = [product](cublasLtMatmulDescAttributes_t attribute, bool transpose) {
    const cublasOperation_t value = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    MOESAIC_BLAS_CALL(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof(value)));
  };
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b);
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a);
  return owner;
}

// Of all matrices of a batch, and of rows that a pitch sets apart.
std::uint32_t alignment(const void* p, DType dtype, std::int64_t stride, std::int64_t pitch) {
  const auto stride_bytes = static_cast<std::uint64_t>(stride) * byte_size(dtype),
             pitch_bytes = static_cast<std::uint64_t>(pitch) * byte_size(dtype);
  std::uint32_t bytes = kMaxAlignment;
  while (!is_aligned(p, bytes) || stride_bytes % bytes != 0 || pitch_bytes % bytes != 0)
    bytes /= 2;
  return bytes;
}

GemmKey key_of(const BlasProduct& p) {
  return {
      .m = p.m(),
      .n = p.n(),
      .k = p.k(),
      .batch = p.nominal_batch,
      .pitch_a = p.a.pitch,
      .pitch_b = p.b.pitch,
      .pitch_c = p.d_pitch,
      .transpose_a = p.transpose_a,
      .transpose_b = p.transpose_b,
      .accumulate = p.beta != 0,
      .input = p.input,
      .output = p.output,
      .align_a = alignment(p.a.data, p.input, p.a.stride, p.a.pitch),
      .align_b = alignment(p.b.data, p.input, p.b.stride, p.b.pitch),
      .align_c = std::min(alignment(p.d, p.output, p.d_stride, p.d_pitch),
                          alignment(p.c == nullptr ? p.d : p.c, p.output, p.d_stride, p.d_pitch))};
}

struct Layouts {
  Layout a, b, d;  // as the product names them; cublasLt gets b first

  Layouts(const BlasProduct& p, std::int64_t batch)
      : a(make_layout(p.input, p.a.rows, p.a.cols, p.a.pitch, batch, p.a.stride)),
        b(make_layout(p.input, p.b.rows, p.b.cols, p.b.pitch, batch, p.b.stride)),
        d(make_layout(p.output, p.m(), p.n(), p.d_pitch, batch, p.d_stride)) {}
};

Preference make_preference(const GemmKey& key, cublasLtReductionScheme_t reduction) {
  cublasLtMatmulPreference_t preference = nullptr;
  MOESAIC_BLAS_CALL(cublasLtMatmulPreferenceCreate(&preference));
  Preference owner(preference);
  const auto set = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    MOESAIC_BLAS_CALL(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kBlasWorkspaceBytes));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(reduction));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_c);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_c);
  return owner;
}

std::int32_t number_of_parts(const cublasLtMatmulAlgo_t& algorithm) {
  std::int32_t parts = 0;
  std::size_t written = 0;
  MOESAIC_BLAS_CALL(cublasLtMatmulAlgoConfigGetAttribute(
      &algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof(parts), &written));
  return std::max(parts, 1);
}

// Weight gradients whose result has too few tiles to occupy a device, with long sums over tokens: only these have their sums
// split. The rule knows nothing of the device, so that it does not decide about bits.
// Measured on an H200 with cublasLt 13.1, sums of 16384: 64 x 2048 in f32 0.106 ms in place of 2.56, in bf16 0.026 in place
// of 0.48; 16 tiles gain a factor of 3 over the best algorithm without split sums, 64 tiles lose 11 %.
bool wants_split_sums(const GemmKey& key) {
  constexpr std::int64_t kTile = 128, kFewTiles = 32, kLongSum = 4096;
  const auto tiles = [](std::int64_t n) { return (n + kTile - 1) / kTile; };
  return key.transpose_a && key.batch == 1 && key.input != DType::f64 && key.k >= kLongSum &&
         tiles(key.m) * tiles(key.n) <= kFewTiles;
}

// The heuristic's best algorithm that forms every sum in one go, or, with `split`, that keeps the parts of the sums in the
// workspace and adds them in a second kernel, in a fixed order. Adding parts in place, where the one that arrives first
// could decide the bits, is never allowed.
std::optional<cublasLtMatmulAlgo_t> propose(BlasLt& blas,
                                            const BlasProduct& p,
                                            const GemmKey& key,
                                            const MatmulDesc& description,
                                            bool split) {
  const Layouts nominal(p, p.nominal_batch);
  const Preference preference = make_preference(
      key, split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE);
  std::array<cublasLtMatmulHeuristicResult_t, kMaxProposals> proposals{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(blas.handle.get(),
                                                               description.get(),
                                                               nominal.b.get(),
                                                               nominal.a.get(),
                                                               nominal.d.get(),
                                                               nominal.d.get(),
                                                               preference.get(),
                                                               kMaxProposals,
                                                               proposals.data(),
                                                               &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return std::nullopt;
  check_blas(status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; i < found; ++i) {
    const auto& proposal = proposals[static_cast<std::size_t>(i)];
    if (proposal.state == CUBLAS_STATUS_SUCCESS && (number_of_parts(proposal.algo) > 1) == split)
      return proposal.algo;
  }
  return std::nullopt;
}

// Of 386 algorithms without split sums that cublasLt 13.1 proposed for 55 products of large models on an H200, all but four
// (algorithm 16, never proposed first) gave the bits of the first proposal, and with split sums the bits followed from the
// number of parts alone: tiles decide about speed, not about bits.
cublasLtMatmulAlgo_t choose(BlasLt& blas, const BlasProduct& p, const MatmulDesc& description) {
  const GemmKey key = key_of(p);
  const auto known = blas.choices.find(key);
  if (known != blas.choices.end()) return known->second;
  std::optional<cublasLtMatmulAlgo_t> choice;
  if (wants_split_sums(key)) choice = propose(blas, p, key, description, true);
  if (!choice) choice = propose(blas, p, key, description, false);
  if (!choice) {
    throw InternalError("cublasLt offers no algorithm for " + std::to_string(key.m) + " x " +
                        std::to_string(key.n) + " x " + std::to_string(key.k) + " " +
                        name(key.input));
  }
  blas.choices.emplace(key, *choice);
  return *choice;
}

template <class Scale>
void enqueue(CudaContext& context, const BlasProduct& p, const TensorView& workspace) {
  auto& blas = *static_cast<BlasLt*>(context.blas_lt);
  const MatmulDesc description = make_description(p);
  const Layouts layouts(p, p.batch);
  const auto algorithm = choose(blas, p, description);
  const auto alpha = static_cast<Scale>(p.alpha), beta = static_cast<Scale>(p.beta);
  MOESAIC_BLAS_CALL(cublasLtMatmul(blas.handle.get(),
                                   description.get(),
                                   &alpha,
                                   p.b.data,
                                   layouts.b.get(),
                                   p.a.data,
                                   layouts.a.get(),
                                   &beta,
                                   p.c == nullptr ? p.d : p.c,
                                   layouts.d.get(),
                                   p.d,
                                   layouts.d.get(),
                                   &algorithm,
                                   workspace.data(),
                                   workspace.bytes(),
                                   native_stream(context)));
}

}  // namespace

TensorView take_blas_workspace(Arena& arena) {
  return arena.take({kBlasWorkspaceBytes}, DType::u8, "gemm.workspace");
}

void multiply(CudaContext& context, const BlasProduct& product, TensorView workspace) {
  use_device(context.stream.device());
  if (product.input == DType::f64) return enqueue<double>(context, product, workspace);
  enqueue<float>(context, product, workspace);
}

}  // namespace moesaic::cuda
