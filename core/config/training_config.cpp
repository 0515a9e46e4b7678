#include "core/config/training_config.h"

#include "core/config/fields.h"

namespace moesaic::config {
namespace {

constexpr double kMaxCount = 1LL << 40;  // steps, sequences
constexpr double kMaxTokens = 1LL << 60;

}  // namespace

void RunConfig::describe(Fields<RunConfig>& f) {
  using S = RunConfig;
  f("dir", &S::dir, "Folder of the run: metrics, effective configuration, checkpoints.")
      .in(Unit::path)
      .default_is("runs/<name of the configuration file>")
      .example("runs/my_run");
  f("seed", &S::seed, "Seed of the initial weights and of the sample order.").at_least(0);
  f("device", &S::device, "Where the model runs; auto = cuda where a GPU is found, else cpu.");
  f("precision",
    &S::precision,
    "Compute type: f64 and f32 use one type throughout, bf16 keeps f32 statistics, gradients and "
    "master weights. auto = f32 on cpu, bf16 on cuda.");
  f("deterministic",
    &S::deterministic,
    "Two runs of one configuration give the same bits. false allows "
    "model.indexer.key_sums: float_atomics, and changes nothing by itself.");
  f("threads", &S::threads, "CPU threads per rank.").between(1, 256);
  f("max_minutes",
    &S::max_minutes,
    "Time after which the run saves a checkpoint and ends with exit code 75; null = no limit.")
      .in(Unit::minutes)
      .above(0)
      .example("230");
}

void DataFileConfig::describe(Fields<DataFileConfig>& f) {
  using S = DataFileConfig;
  f.shorthand("path");
  f("path", &S::path, "A file, a Megatron prefix, a folder (all its data files) or a pattern.")
      .required()
      .in(Unit::path)
      .example("tokens/web");
  f("weight",
    &S::weight,
    "Share of the samples that come from this entry, in any unit. With weights every entry has one "
    "and is a data set with epochs of its own; without, all entries are one data set.")
      .above(0)
      .example("0.3");
  f("format", &S::format, "How the files of this entry are read.")
      .default_is("null (data.format)")
      .example("megatron");
}

void DataConfig::describe(Fields<DataConfig>& f) {
  using S = DataConfig;
  f("train",
    &S::train,
    "Training data: a file, a Megatron prefix, a folder (all its data files) or a pattern, or a "
    "list "
    "of them; entries {path, weight, format} make a blend.")
      .required()
      .one_or_list()
      .example("data/tokens/train");
  f("valid", &S::valid, "Held-out data for evaluation; empty = no evaluation.")
      .one_or_list()
      .example("data/tokens/valid");
  f("format",
    &S::format,
    "How the files are read. bytes_text: text files, one token per byte, documents separated by "
    "a line that holds a form feed and nothing else. megatron: PREFIX.bin and PREFIX.idx. llmc: "
    ".bin files of llm.c. nanogpt: raw tokens without header. chat_jsonl: conversations, a JSON "
    "record "
    "per line, loss on the assistant's tokens. auto: by extension and first bytes; "
    "what has no known extension is bytes_text.");
  f("tokenizer",
    &S::tokenizer,
    "What made the tokens of the data: bytes, a tokenizer.json, a tiktoken rank file, or a folder "
    "that holds one. "
    "The run keeps a copy, its checkpoints a hash; generate reads and writes text with it.")
      .in(Unit::path)
      .default_is("null (bytes for text files; unknown for token files)")
      .example("DeepSeek-V3/tokenizer.json");
  f("token_dtype", &S::token_dtype, "Type of the tokens in nanogpt files.");
  f("end_of_text",
    &S::end_of_text,
    "The token that ends documents in llmc and nanogpt files, which have no table of documents. "
    "Attention and positions start anew after it.")
      .between(0, 1 << 30)
      .default_is(
          "null (llmc: 50256 for GPT-2, 128000 for Llama 3; nanogpt: a file is one document)")
      .example("50256");
  f("sequence_length", &S::sequence_length, "Tokens per sequence.")
      .required()
      .between(1, 1 << 30)
      .also({"seq_length", "seq_len", "max_seq_len"})
      .example("4096");
}

void LrScaleConfig::describe(Fields<LrScaleConfig>& f) {
  using S = LrScaleConfig;
  f("pattern", &S::pattern, "Logical parameter names, `*` stands for any characters.")
      .required()
      .example("model.layers.*.self_attn.*");
  f("scale", &S::scale, "Factor on the learning rate.").required().at_least(0).example("0.1");
}

void PhaseConfig::describe(Fields<PhaseConfig>& f) {
  using S = PhaseConfig;
  f("until", &S::until, "Step after which the phase ends, counted from the start of the run.")
      .between(1, kMaxCount)
      .default_is("by until_tokens; in the last phase, the end of the run")
      .or_null()
      .example("1000");
  f("until_tokens",
    &S::until_tokens,
    "Tokens seen from the start of the run with which the phase ends: after the first step that "
    "reaches them.")
      .between(1, kMaxTokens)
      .example("300e9");
  f("sequence_length", &S::sequence_length, "Tokens per sequence in this phase.")
      .between(1, 1 << 30)
      .default_is("null (data.sequence_length)")
      .example("65536");
  f("global_batch_size", &S::global_batch_size, "Sequences per optimizer step in this phase.")
      .between(1, kMaxCount)
      .default_is("null (train.global_batch_size; with train.global_batch_tokens, their tokens)");
  f("micro_batch_size",
    &S::micro_batch_size,
    "Sequences that pass the model at once on one rank in this phase; long sequences need a small "
    "one.")
      .between(1, 1 << 20)
      .default_is("null (train.micro_batch_size)");
  f("lr_schedule",
    &S::lr_schedule,
    "Learning-rate schedule of this phase; its steps count from the start of the phase.")
      .default_is("null (optimizer.lr_schedule, counted from the start of the run)");
  f("lr", &S::lr, "Peak learning rate of this phase.").above(0).default_is("null (optimizer.lr)");
  f("lr_min", &S::lr_min, "Final learning rate of this phase.")
      .at_least(0)
      .default_is("null (optimizer.lr_min)");
  f("warmup_steps", &S::warmup_steps, "Warm-up steps at the start of this phase.")
      .between(0, kMaxCount)
      .default_is("null (optimizer.warmup_steps; 0 where lr_schedule is set)");
  f("sparse_stage",
    &S::sparse_stage,
    "Sparse attention: warmup trains the indexer alone against dense attention, sparse trains "
    "everything on the selected keys.");
  f("freeze", &S::freeze, "Name patterns of parameters that are not trained in this phase.")
      .example("[model.embed_tokens.weight]");
  f("lr_scale", &S::lr_scale, "Learning-rate factors by name pattern; the last match counts.")
      .example("[{pattern: \"*.indexer.*\", scale: 10}]");
}

void TrainConfig::describe(Fields<TrainConfig>& f) {
  using S = TrainConfig;
  f("steps", &S::steps, "Optimizer steps of the whole run.")
      .between(1, kMaxCount)
      .default_is("by train.tokens or the end of the last phase; one of the three is required")
      .or_null()
      .also({"max_steps", "train_iters", "iters"})
      .example("10_000");
  f("tokens",
    &S::tokens,
    "Tokens of the whole run: it ends after the first step that reaches them.")
      .between(1, kMaxTokens)
      .also({"train_tokens", "max_tokens"})
      .example("15e12");
  f("global_batch_size", &S::global_batch_size, "Sequences per optimizer step, over all ranks.")
      .between(1, kMaxCount)
      .default_is("train.global_batch_tokens / data.sequence_length; one of the two is required")
      .or_null()
      .example("256");
  f("global_batch_tokens",
    &S::global_batch_tokens,
    "Tokens per optimizer step, over all ranks, held in every phase whatever its sequence_length.")
      .between(1, 1LL << 50)
      .example("4_194_304");
  f("micro_batch_size", &S::micro_batch_size, "Sequences that pass the model at once on one rank.")
      .between(1, 1 << 20);
  f("eval_every", &S::eval_every, "Steps between evaluations on data.valid; 0 = at the end only.")
      .between(0, kMaxCount)
      .example("500");
  f("eval_batches", &S::eval_batches, "Global batches per evaluation.").between(1, kMaxCount);
  f("phases",
    &S::phases,
    "Phases of the run in order; the last ends at `steps`. Empty = one phase.");
  f("max_bad_steps",
    &S::max_bad_steps,
    "Steps in a row with non-finite loss or gradient after which the run ends with exit code 5.")
      .between(1, kMaxCount);
  f("head_chunk_rows",
    &S::head_chunk_rows,
    "Tokens whose logits are held at once in head and cross-entropy.")
      .between(1, 1 << 30);
}

void OptimizerConfig::describe(Fields<OptimizerConfig>& f) {
  using S = OptimizerConfig;
  f("name",
    &S::name,
    "adamw for everything, or muon for matrices with AdamW for embedding, head, norms and "
    "vectors.");
  f("lr", &S::lr, "Peak learning rate.")
      .required()
      .above(0)
      .example("3e-4")
      .also({"learning_rate", "max_lr"});
  f("lr_min", &S::lr_min, "Learning rate at the end of the decay.")
      .at_least(0)
      .also({"min_lr"})
      .example("3e-5");
  f("lr_schedule",
    &S::lr_schedule,
    "constant; cosine from lr to lr_min at the last step; wsd = warm-up, stable, decay over the "
    "last decay_steps.")
      .also({"lr_decay_style", "lr_scheduler"});
  f("warmup_steps", &S::warmup_steps, "Steps of the linear warm-up from 0.")
      .between(0, kMaxCount)
      .also({"lr_warmup_steps"})
      .example("1000");
  f("decay_steps", &S::decay_steps, "Steps of the final decay of wsd.")
      .between(0, kMaxCount)
      .example("2000");
  f("decay_shape", &S::decay_shape, "Shape of the decay of wsd.");
  f("beta1", &S::beta1, "Decay of AdamW's first moment.").at_least(0).below(1).also({"adam_beta1"});
  f("beta2", &S::beta2, "Decay of AdamW's second moment.")
      .at_least(0)
      .below(1)
      .also({"adam_beta2"});
  f("eps", &S::eps, "Epsilon of AdamW, added after the bias correction.")
      .above(0)
      .also({"adam_eps", "adam_epsilon"});
  f("weight_decay",
    &S::weight_decay,
    "Decoupled weight decay of matrices, embedding and head; vectors have none.")
      .at_least(0);
  f("clip_grad_norm", &S::clip_grad_norm, "Limit of the global gradient norm; 0 = no clipping.")
      .at_least(0)
      .also({"clip_grad", "max_grad_norm", "grad_clip"});
  f("muon_momentum", &S::muon_momentum, "Momentum of Muon.").at_least(0).below(1);
  f("muon_nesterov", &S::muon_nesterov, "Nesterov form of Muon's momentum.");
  f("muon_per_head",
    &S::muon_per_head,
    "Muon orthogonalises query, key and value projections head by head.");
  f("ns_steps", &S::ns_steps, "Newton-Schulz iterations of Muon.").between(1, 20);
  f("ns_products",
    &S::ns_products,
    "Products of the Newton-Schulz iterations on a GPU: bf16 (about 1 % off, as published), f32 "
    "(three "
    "bf16 products each), auto = bf16 where the model computes in bf16. The CPU always uses the "
    "type of "
    "the master weights.");
  f("qk_clip_tau",
    &S::qk_clip_tau,
    "QK-clip: MLA heads whose largest attention logit exceeds this get their query and key weights "
    "scaled down; null = off.")
      .above(0)
      .example("100");
  f("ema_decay", &S::ema_decay, "Decay of the averaged copy of the weights; null = none is kept.")
      .at_least(0)
      .below(1)
      .example("0.999");
  f("untouched",
    &S::untouched,
    "Experts without a token in a step: dense = their gradient is zero, and momentum and weight "
    "decay act as usual; lazy = the same values, but with experts.offload full an expert stays "
    "where it is until its next token, and is given then what it missed; skip = weights and state "
    "stay as they are, which gives other weights (and with experts.offload spares their way to the "
    "device and back).")
      .was("decay", "dense");
  f("master",
    &S::master,
    "Masters of bf16 weights: f32 = a copy of 4 bytes beside the weight; split = the bf16 weight "
    "and 2 bytes that complete it to the same f32 number. Updates are the same; weights half-way "
    "between two bf16 numbers are rounded away from zero instead of to even. Needs run.precision "
    "bf16. Checkpoints are the same, so a run may change this when it continues.");
}

}  // namespace moesaic::config
