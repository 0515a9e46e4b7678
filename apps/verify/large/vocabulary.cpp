// Losses over, and embeddings from, a vocabulary of 163,840 words.
#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/embedding.h"

namespace moesaic::verify {
namespace {

constexpr std::int64_t kWords = 163840;

// By `blocks` ranks that share the vocabulary: their rows add up.
void report_embedding(CaseRun& run, std::int64_t blocks) {
  const TensorView table = run.load("w.table"), ids = run.load_i32("in.ids"),
                   dy = run.load("cot.y"), y = run.zeros(dy.shape(), dy.dtype()),
                   share = run.poisoned(dy.shape(), dy.dtype()),
                   dtable = run.zeros(table.shape(), run.precision().grad);
  const std::int64_t words = table.dim(0) / blocks;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto own = [&](const TensorView& all) { return all.rows(b * words, (b + 1) * words); };
    moesaic::run(run.backend(),
                 EmbeddingForward{
                     .y = share, .ids = ids, .table = own(table), .block = b, .blocks = blocks});
    moesaic::run(run.backend(), Accumulate{.y = y, .x = share});
    moesaic::run(run.backend(),
                 EmbeddingBackward{
                     .dtable = own(dtable), .ids = ids, .dy = dy, .block = b, .blocks = blocks});
  }
  run.expect("out.y", y);
  run.expect("grad.w.table", dtable);
}

void run_embedding(CaseRun& run) {
  report_embedding(run, 1);
  if (run.report_again("vocabulary in blocks")) report_embedding(run, 4);
}

const RegisterFamily family{{"embedding__", run_embedding}};

void losses(CaseBuilder& b) {
  const std::int64_t rows = 7;
  b.normal("in.logits", {rows, kWords}, 2.0);
  b.normal("in.teacher", {rows, kWords}, 2.0);
  b.uniform("in.weight", {rows}, 0.5, 1.5);
  b.fill("in.mask", {rows}, [](std::int64_t i, double) { return i == 2 ? 0.0 : 1.0; });
  b.ints("in.target", {rows}, {0, kWords - 1, -100, 8191, 8192, 100000, 5});
  // lk compares p with q word by word.
  b.accuracy(4096, 6, {"grad_lk", "grad.in.logits"});
  b.expect_path("cross_entropy", "kept");
}

// Few distinct words, so that many rows meet in one of the table.
void embedding(CaseBuilder& b, std::int64_t words, std::int64_t tokens, std::int64_t width) {
  b.random_ints("in.ids", {tokens}, 40);
  b.normal("w.table", {words, width});
  b.normal("cot.y", {tokens, width});
  b.accuracy(tokens, 2);
}

}  // namespace

void add_vocabulary_cases(LargeCases& cases) {
  cases.push_back({"loss__vocab_large", [](CaseBuilder& b) { losses(b); }});
  cases.push_back({"embedding__large", [](CaseBuilder& b) { embedding(b, 500, 700, 2048); }});
  cases.push_back({"embedding__large_words", [](CaseBuilder& b) { embedding(b, kWords, 130, 8); }});
}

}  // namespace moesaic::verify
