// Sizes of large models, as they meet on one GPU: configs/bench, and those of published measurements.
#include "apps/bench/op_cases.h"
#include "kernels/ops/gemm.h"

namespace moesaic::bench {

const std::vector<OpCases::Group>& OpCases::large_groups() {
  static const std::vector<Group> groups{
      &OpCases::large_products,        &OpCases::large_kda,
      &OpCases::large_attention,       &OpCases::large_sparse_attention,
      &OpCases::large_long<8192, 16>,  &OpCases::large_long<16384, 16>,
      &OpCases::large_long<32768, 16>, &OpCases::large_long<65536, 16>,
      &OpCases::large_long<8192, 96>,  &OpCases::large_long<16384, 96>,
      &OpCases::large_long<32768, 96>, &OpCases::large_routing,
      &OpCases::large_experts_a,       &OpCases::large_experts_b,
      &OpCases::large_experts_c,       &OpCases::large_experts_d,
      &OpCases::large_experts_e,       &OpCases::large_experts_f,
      &OpCases::large_experts_g,       &OpCases::large_elementwise,
      &OpCases::large_optimizer};
  return groups;
}

void OpCases::large_products() {
  if (!wanted(Gemm::kName)) return;
  products(16384, 2048, 2048);
  products(16384, 21888, 2048);
  products(2048, 102400, 2048);
  products(8192, 8192, 8192);
}

void OpCases::large_kda() {
  kda({8192, 32, 128});
  kda({16384, 16, 128});
}

void OpCases::large_attention() {
  AttentionSizes s{.tokens = 8192, .heads = 32, .nope = 128, .rope = 64, .value = 128};
  attention(s);
  s.tokens = 16384;
  s.documents = 4;
  s.heads = 16;
  attention(s);
}

void OpCases::large_sparse_attention() {
  AttentionSizes s{.tokens = 16384,
                   .documents = 4,
                   .heads = 16,
                   .nope = 128,
                   .rope = 64,
                   .value = 128,
                   .index_heads = 64,
                   .index_width = 128,
                   .selected = 2048};
  attention(s);
}

// One document, both forms of attention over 2048 selected keys: where gathering begins to pay.
void OpCases::large_long_attention(std::int64_t tokens, std::int64_t heads) {
  sparse_mla({.tokens = tokens,
              .heads = heads,
              .latent = 512,
              .rope = 64,
              .selected = 2048,
              .float_atomics = true});
  if (tokens * tokens * heads > std::int64_t{1} << 36) return;  // seconds a call
  if (wanted("attention"))
    attention({.tokens = tokens,
               .heads = heads,
               .nope = 128,
               .rope = 64,
               .value = 128,
               .selected = 2048});
}

void OpCases::large_routing() {
  routing({.tokens = 16384, .experts = 128, .choices = 8, .latent = 1024});
  routing({.tokens = 8192, .experts = 896, .choices = 16, .latent = 3584});
}

void OpCases::large_experts_a() {
  if (wanted("grouped_linear")) grouped(64, 1024, 3584, 6144);
}
void OpCases::large_experts_b() {
  if (wanted("grouped_linear")) grouped(112, 1170, 3584, 6144);
}
void OpCases::large_experts_c() {
  if (wanted("grouped_linear")) grouped(448, 146, 3584, 6144);
}
void OpCases::large_experts_d() {
  if (!wanted("grouped_linear")) return;
  grouped(256, 64, 2048, 2816);
  grouped(128, 1024, 1024, 2816);
}

void OpCases::large_experts_e() {
  grouped_glu(64, 1536, 2048, 1408, false);
}
void OpCases::large_experts_f() {
  grouped_glu(128, 1024, 1024, 1408, true);
}
void OpCases::large_experts_g() {
  grouped_glu(112, 1170, 3584, 3072, true);
}

void OpCases::large_elementwise() {
  elementwise({.tokens = 16384,
               .hidden = 2048,
               .width = 10944,
               .heads = 16,
               .head = 128,
               .vocabulary = 102400,
               .loss_rows = 2048});
}

void OpCases::large_optimizer() {
  updates(std::int64_t{1} << 28);
  muon(16, 128, 2048);
  muon(128, 1408, 1024);
  muon(128, 1024, 1408);
  muon(1, 2048, 2048);
  muon(1, 10944, 2048);
}

}  // namespace moesaic::bench
