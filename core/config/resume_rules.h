#pragma once
// Which keys a run may change when it continues: the table of on_resume.cpp, and of its test, which wants every key of
// the schema in here. A new key outside of `model` needs a line of its own; a new key of `model` is refused until it has
// one.
#include "core/config/on_resume.h"

namespace moesaic::config {

inline constexpr std::string_view kOtherModel = "it was trained as another model";
inline constexpr std::string_view kOtherOrder = "the order of the data would change";
inline constexpr std::string_view kOneValue = "it has one value in this version";
inline constexpr std::string_view kInProgress =
    "but the sequence length of a phase in progress must not change";

inline constexpr ResumeRule kResumeRules[] = {
    {"base", OnResume::free, ""},
    {"run.dir", OnResume::free, ""},
    {"run.seed", OnResume::refused, kOtherOrder},
    {"run.device", OnResume::logged, "CPU and GPU round differently"},
    {"run.precision", OnResume::logged, "f64 and the others cannot continue each other"},
    {"run.deterministic", OnResume::logged, kOneValue},
    {"run.threads", OnResume::free, ""},
    {"run.max_minutes", OnResume::free, ""},

    // Weights, and what they were trained to do.
    {"model.*", OnResume::refused, kOtherModel},
    {"model.model_type", OnResume::free, ""},
    {"model.initializer_range", OnResume::free, "it acts at the start only"},
    {"model.max_position_embeddings", OnResume::logged, "for longer sequences"},
    {"model.rope_theta", OnResume::logged, "for longer sequences"},
    {"model.rope_scaling.*", OnResume::logged, "for longer sequences"},
    {"model.capacity_factor", OnResume::logged, ""},
    {"model.capacity_policy", OnResume::logged, ""},
    {"model.balance.sign_gamma", OnResume::logged, ""},
    {"model.balance.aux_loss_weight", OnResume::logged, ""},
    {"model.balance.z_loss_weight", OnResume::logged, ""},
    {"model.indexer.kl_weight", OnResume::logged, ""},
    {"model.mtp.loss_weight", OnResume::logged, ""},

    {"data.train",
     OnResume::logged,
     "moved files are the same data; the number of tokens must stay"},
    {"data.valid", OnResume::logged, "held-out losses only"},
    {"data.format", OnResume::logged, "the number of tokens must stay"},
    {"data.token_dtype", OnResume::logged, "the number of tokens must stay"},
    {"data.end_of_text", OnResume::refused, kOtherOrder},
    {"data.tokenizer",
     OnResume::logged,
     "a moved file is the same tokenizer; another one is refused"},
    {"data.sequence_length", OnResume::logged, kInProgress},

    {"train.steps", OnResume::logged, "learning-rate schedules may depend on it"},
    {"train.global_batch_size", OnResume::refused, kOtherOrder},
    {"train.micro_batch_size", OnResume::logged, "sums are rounded differently"},
    {"train.eval_every", OnResume::free, ""},
    {"train.eval_batches", OnResume::free, "held-out losses only"},
    {"train.phases", OnResume::logged, kInProgress},
    {"train.phases[].*", OnResume::logged, kInProgress},
    {"train.max_bad_steps", OnResume::free, ""},
    {"train.head_chunk_rows", OnResume::logged, "sums are rounded differently"},

    {"optimizer.name", OnResume::refused, "the checkpoint holds another optimizer's state"},
    {"optimizer.lr", OnResume::logged, ""},
    {"optimizer.lr_min", OnResume::logged, ""},
    {"optimizer.lr_schedule", OnResume::logged, ""},
    {"optimizer.warmup_steps", OnResume::logged, ""},
    {"optimizer.decay_steps", OnResume::logged, ""},
    {"optimizer.decay_shape", OnResume::logged, ""},
    {"optimizer.beta1", OnResume::logged, ""},
    {"optimizer.beta2", OnResume::logged, ""},
    {"optimizer.eps", OnResume::logged, ""},
    {"optimizer.weight_decay", OnResume::logged, ""},
    {"optimizer.clip_grad_norm", OnResume::logged, ""},
    {"optimizer.muon_momentum", OnResume::logged, ""},
    {"optimizer.muon_nesterov", OnResume::logged, ""},
    {"optimizer.muon_per_head", OnResume::logged, ""},
    {"optimizer.ns_steps", OnResume::logged, ""},
    {"optimizer.ns_products", OnResume::logged, ""},
    {"optimizer.qk_clip_tau", OnResume::logged, ""},
    {"optimizer.ema_decay", OnResume::logged, "from or to null the checkpoint does not fit"},
    {"optimizer.untouched", OnResume::logged, ""},
    {"optimizer.master",
     OnResume::logged,
     "weights half-way between two numbers are rounded otherwise"},

    {"parallel.dp", OnResume::logged, "sums over another number of ranks are rounded differently"},
    {"parallel.tp", OnResume::logged, kOneValue},
    {"parallel.pp", OnResume::logged, kOneValue},
    {"parallel.cp", OnResume::logged, kOneValue},
    {"parallel.ep", OnResume::logged, kOneValue},
    {"parallel.etp", OnResume::logged, kOneValue},
    {"parallel.schedule", OnResume::logged, kOneValue},
    {"parallel.order", OnResume::logged, kOneValue},
    {"dispatch.exchange", OnResume::logged, kOneValue},
    {"dispatch.hierarchy", OnResume::logged, kOneValue},
    {"dispatch.hops", OnResume::logged, kOneValue},
    {"dispatch.dtype", OnResume::logged, kOneValue},
    {"activations.recompute", OnResume::free, ""},
    {"activations.residual_offload", OnResume::free, ""},
    {"experts.offload", OnResume::free, ""},
    {"memory.device_budget", OnResume::free, ""},
    {"memory.host_budget", OnResume::free, ""},
    {"memory.file_budget", OnResume::free, ""},
    {"memory.file_path", OnResume::free, ""},
    {"comm.ranks_per_node", OnResume::logged, kOneValue},
    {"comm.watchdog_s", OnResume::free, ""},
    {"comm.reduction", OnResume::logged, ""},
    {"comm.share_gpu", OnResume::free, ""},

    {"checkpoint.every", OnResume::free, ""},
    {"checkpoint.keep_last", OnResume::free, ""},
    {"checkpoint.keep_every", OnResume::free, ""},
    {"checkpoint.async", OnResume::free, ""},
    {"checkpoint.on_error", OnResume::free, ""},
    {"checkpoint.save_at_end", OnResume::free, ""},
    {"checkpoint.load_weights", OnResume::free, "it acts at the start only"},
    {"log.interval", OnResume::free, ""},
    {"log.metrics", OnResume::free, ""},
    {"log.trace_steps", OnResume::free, ""},
    {"debug.inject_nan_step", OnResume::logged, ""},
    {"debug.immediate_streams", OnResume::free, ""},
    {"debug.nvtx", OnResume::free, ""},
};

}  // namespace moesaic::config
