// The tensor-core attention kernels' host side: when they apply, their scratch memory, and the flags
// of tiles without a visible pair.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kFlagThreads = 128;

// One block per (half of a query block, kFlagThreads tiles of keys).
__global__ void __launch_bounds__(kFlagThreads) flags_kernel(std::uint8_t* flags,
                                                             std::int64_t per_row,
                                                             QueryBlocks blocks,
                                                             SelectionBits bits) {
  const int index = static_cast<int>(blockIdx.x) / 2, half = static_cast<int>(blockIdx.x) % 2;
  if (index >= *blocks.count) return;
  const QueryBlock block = blocks.list[index];
  const int tile = static_cast<int>(blockIdx.y) * kFlagThreads + static_cast<int>(threadIdx.x);
  // The words of a row are there up to a multiple of 128 keys.
  if (tile >= (block.end - block.begin + 127) / 128 * 2) return;
  std::uint64_t any = 0;
  for (int r = half * kHalfTile; r < min(block.count, (half + 1) * kHalfTile); ++r)
    any |= *reinterpret_cast<const std::uint64_t*>(bits.words + (block.row + r) * bits.per_row +
                                                   2 * tile);
  flags[blockIdx.x * per_row + tile] = any != 0;
}

bool is_model_size(const AttentionSizes& size, double scale) {
  return size.dn == kHeadWidth && size.dv == kHeadWidth && (size.dr == 0 || size.dr == 64) &&
         size.queries > 0 && size.heads > 0 && scale > 0;
}

template <class Op>
bool inputs_are_tiled(const CudaContext& context, const Op& op) {
  const AttentionSizes size = attention_sizes(op);
  return may_specialise(context) && op.q.dtype() == DType::bf16 && is_model_size(size, op.scale) &&
         (op.selected.empty() || size.keys <= kTiledLongest) &&
         can_map(op.q.data(), size.heads * size.dqk(), DType::bf16) &&
         can_map(op.kvb.data(), size.heads * size.dkv(), DType::bf16) &&
         (size.dr == 0 || can_map(op.kr.data(), size.dr, DType::bf16)) &&
         is_aligned(op.o.data(), 16);
}

// As if every key were a query.
AttentionSizes with_all_keys(AttentionSizes size) {
  size.queries = size.keys;
  return size;
}

// Scratch that both directions need; the same in dry runs.
struct TiledScratch {
  AttentionSizes size;
  QueryBlocksMemory blocks;
  TensorView words, flags;
  template <class Op>
  TiledScratch(Arena& scratch, const Op& op) : size(attention_sizes(op)) {
    blocks = QueryBlocksMemory::take(scratch, size, kBlockRows);
    words = take_selection_bits(scratch, size, op.selected);
    if (!op.selected.empty())
      flags = scratch.take(
          {2 * blocks.list.dim(0), (size.keys + 127) / 128 * 2}, DType::u8, "attention tile flags");
  }
  template <class Op>
  TiledProblem fill(cudaStream_t stream, const Op& op) const {
    TiledProblem p;
    p.queries = static_cast<int>(size.queries);
    p.keys = static_cast<int>(size.keys);
    p.heads = static_cast<int>(size.heads);
    p.blocks = blocks.blocks();
    p.scale = static_cast<float>(op.scale);
    list_query_blocks(stream, p.blocks, size, op.cu_seqlens, kBlockRows);
    if (op.selected.empty()) return p;
    p.bits = fill_selection_bits(stream, words, size, op.cu_seqlens, op.selected);
    const std::int64_t per_row = flags.dim(1);
    p.flags = {reinterpret_cast<const std::uint8_t*>(flags.data()), per_row};
    flags_kernel<<<dim3(static_cast<unsigned>(flags.dim(0)),
                        static_cast<unsigned>((per_row + kFlagThreads - 1) / kFlagThreads)),
                   kFlagThreads,
                   0,
                   stream>>>(
        reinterpret_cast<std::uint8_t*>(flags.data()), per_row, p.blocks, p.bits);
    check_launch("kernel attention: tile flags");
    return p;
  }
};

}  // namespace

CUtensorMap head_map(const ConstTensorView& tensor, int box_rows) {
  const std::int64_t rows = tensor.dim(0), width = tensor.dim(tensor.rank() - 1);
  if (tensor.rank() == 2)
    return make_tensor_map(
        tensor.data(), DType::bf16, {{width, rows}, {width}, {kChannelBlock, box_rows}});
  const std::int64_t heads = tensor.dim(1);
  return make_tensor_map(
      tensor.data(),
      DType::bf16,
      {{width, heads, rows}, {width, heads * width}, {kChannelBlock, 1, box_rows}});
}

bool attention_is_tiled(const CudaContext& context, const AttentionForward& op) {
  return inputs_are_tiled(context, op);
}

void attention_tiled(CudaContext& context, const AttentionForward& op) {
  const Arena::Mark mark(context.scratch);
  const TiledScratch scratch(context.scratch, op);
  const TensorView maxima = context.scratch.take(
      {scratch.size.heads, scratch.blocks.list.dim(0)}, DType::f32, "attention maxima");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  const TiledProblem problem = scratch.fill(stream, op);
  const bool wants_max = !op.max_logit.empty();
  tiled_forward(stream,
                problem,
                op,
                {op.o.as<float>(), op.lse.as<float>(), wants_max ? maxima.as<float>() : nullptr});
  if (wants_max)
    combine_max_logits(stream,
                       op.max_logit.as<float>(),
                       maxima.as<float>(),
                       problem.blocks,
                       scratch.size.heads,
                       op.accumulate_max);
}

bool attention_is_tiled(const CudaContext& context, const AttentionBackward& op) {
  return inputs_are_tiled(context, op) && is_aligned(op.dq.data(), 16) &&
         is_aligned(op.dkvb.data(), 16) &&
         (op.d_o.dtype() != DType::bf16 || is_aligned(op.d_o.data(), 16));
}

void attention_tiled(CudaContext& context, const AttentionBackward& op) {
  const Arena::Mark mark(context.scratch);
  const TiledScratch scratch(context.scratch, op);
  const auto& size = scratch.size;
  const AttentionSizes of_keys = with_all_keys(size);
  const auto key_blocks = size.first() == 0
                              ? scratch.blocks
                              : QueryBlocksMemory::take(context.scratch, of_keys, kBlockRows);
  const TensorView delta =
      context.scratch.take({size.heads, size.queries}, DType::f32, "attention delta");
  const TensorView log_sum =
      context.scratch.take({size.heads, size.queries}, DType::f32, "attention log sums");
  const TensorView dkr =
      context.scratch.take({size.heads, size.keys, size.dr}, DType::f32, "attention dkr per head");
  ConstTensorView d_o = op.d_o;
  TensorView rounded;
  if (op.d_o.dtype() != DType::bf16)
    d_o = rounded = context.scratch.take(op.d_o.shape(), DType::bf16, "attention d_o");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  TiledProblem problem = scratch.fill(stream, op);
  problem.key_blocks = key_blocks.blocks();
  if (size.first() != 0)
    list_query_blocks(stream, problem.key_blocks, of_keys, op.cu_seqlens, kBlockRows);
  backward_row_statistics(stream,
                          delta.as<float>(),
                          log_sum.as<float>(),
                          reinterpret_cast<__nv_bfloat16*>(rounded.data()),
                          op,
                          kLog2E);
  const TiledBackward data{delta.as<float>(), log_sum.as<float>(), d_o, dkr.as<float>()};
  tiled_dq(stream, problem, op, data);
  tiled_dkv(stream, problem, op, data);
  if (size.dr > 0) sum_shared_key_gradient(stream, op.dkr, dkr.as<float>(), size);
}

}  // namespace moesaic::cuda
