#include "core/config/system_config.h"

#include "core/config/fields.h"

namespace moesaic::config {
namespace {

constexpr double kMaxRanks = 1 << 20;
constexpr double kMaxChunks = 1 << 10;
constexpr double kMaxExchangeChunks = 64;
constexpr double kMaxCount = 1LL << 40;

}  // namespace

void ParallelConfig::describe(Fields<ParallelConfig>& f) {
  using S = ParallelConfig;
  f("dp", &S::dp, "Data-parallel degree.")
      .between(1, kMaxRanks)
      .default_is("null (ranks / (tp * pp * cp))")
      .also({"data_parallel_size"});
  f("tp",
    &S::tp,
    "Tensor-parallel degree of attention, dense and shared experts, and the vocabulary.")
      .between(1, kMaxRanks)
      .also({"tensor_model_parallel_size", "tensor_parallel_size"});
  f("pp", &S::pp, "Pipeline stages, which share the layers.")
      .between(1, kMaxRanks)
      .also({"pipeline_model_parallel_size", "pipeline_parallel_size"});
  f("cp", &S::cp, "Context-parallel degree: contiguous pieces of a micro-batch's tokens.")
      .between(1, kMaxRanks)
      .also({"context_parallel_size"});
  f("ep", &S::ep, "Expert-parallel degree: ranks that share the experts of a layer.")
      .between(1, kMaxRanks)
      .also({"expert_model_parallel_size", "expert_parallel_size"});
  f("etp", &S::etp, "Tensor-parallel degree inside routed experts.")
      .between(1, kMaxRanks)
      .also({"expert_tensor_parallel_size"});
  f("zero",
    &S::zero,
    "Optimizer state, masters and averages of the weights: 1 shards them over the ranks that sum a "
    "gradient (ZeRO-1: each updates its share, weights are gathered), 0 keeps them whole on each. "
    "The updates have the same bits.")
      .between(0, 1)
      .also({"use_distributed_optimizer", "zero_stage"});
  f("schedule",
    &S::schedule,
    "Pipeline schedule, of effect with pp above 1: a backward as soon as one is ready (1f1b), the "
    "same over several chunks per stage (interleaved), backward in two parts so that gradients of "
    "weights fill idle time (zero_bubble: ZB-H1 with one chunk per stage, ZB-V with two), or all "
    "forwards before all backwards (gpipe).");
  f("chunks",
    &S::chunks,
    "Chunks of consecutive layers that each pipeline stage holds. The chunks of a model are dealt "
    "to the stages in turn; with zero_bubble and two of them, down the stages and up again.")
      .between(1, kMaxChunks)
      .default_is("null (2 with interleaved, else 1)")
      .also({"virtual_pipeline_model_parallel_size", "num_virtual_stages"});
  f("layers",
    &S::layers,
    "Layers of each chunk of the pipeline, in the order of the model: pp * chunks numbers whose "
    "sum "
    "is num_hidden_layers; 0 is allowed for the first and the last chunk, which also hold the "
    "embedding and the head.")
      .between(0, kMaxCount)
      .default_is("[] (balanced by the operations of layers, head and MTP module)")
      .example("[12, 12, 12, 9]");
  f("order",
    &S::order,
    "Order of layers and micro-batches in a step: every micro-batch through all layers "
    "(horizontal), or every layer over all micro-batches before the next layer (vertical), so that "
    "offloaded weights are loaded once for all of them; what is saved of all micro-batches is then "
    "kept at once. The bits are the same; with tied embeddings they differ in the last place.");
}

void DispatchConfig::describe(Fields<DispatchConfig>& f) {
  using S = DispatchConfig;
  f("exchange", &S::exchange, "Method that carries tokens to the ranks of their experts.");
  f("hierarchy", &S::hierarchy, "Order of the hops of the hierarchical exchange.");
  f("hops", &S::hops, "Hops of the hierarchical exchange (3: intra_first only).").between(2, 3);
  f("dtype",
    &S::dtype,
    "Type in which tokens go to their experts: that of the activations, or fp8 (E4M3 with a scale "
    "per "
    "128 elements, rounded once where the token is). Results come back in the type of the "
    "activations. Tokens are rounded so on one rank, too: every layout trains the same model.");
  f("backward_dtype",
    &S::backward_dtype,
    "The same for the gradients that go to the experts in backward.");
  f("buffer_factor",
    &S::buffer_factor,
    "Rows that a rank's buffers hold for its experts, as a multiple of what it gets when all "
    "experts "
    "are chosen equally often; what comes beyond it is computed in further passes, with the same "
    "result. 0 = what it can get at most, so that one pass is enough. Methods that count only: not "
    "dense, hdense.")
      .at_least(0)
      .example("1.25");
  f("overlap",
    &S::overlap,
    "Moves tokens on a stream of their own: to the experts beside the shared experts, and "
    "gradients back "
    "beside the larger of the experts' weight gradients. The same result, more memory for "
    "temporaries.");
  f("chunks",
    &S::chunks,
    "Chunks in which the rows of a layer come to its experts and go back, in forward and backward, "
    "so that some travel while the experts work at another; a rank gets an equal part of its rows "
    "in each, between nodes what its node needs for it. Needs overlap. The same result; 1 = all at "
    "once.")
      .between(1, kMaxExchangeChunks)
      .example("4");
  f("checksum",
    &S::checksum,
    "Checks every message of the exchange by a checksum that its sender made, and ends the run "
    "when "
    "one arrived damaged. Slow: the host waits in every exchange.");
}

void ActivationsConfig::describe(Fields<ActivationsConfig>& f) {
  using S = ActivationsConfig;
  f("recompute",
    &S::recompute,
    "Activations that are computed again in backward instead of kept: none, selective (what needs "
    "no "
    "product of matrices), full, or name patterns, also behind selective. What patterns with ! "
    "name "
    "is kept all the same: with [full, \"!cur.mid\"] backward need not compute attention again "
    "before "
    "the channel mixer's part, and a layer's two halves need not be there at once.")
      .one_or_list()
      .default_is("[] (none)")
      .example("[selective, \"mlp.*\", \"attn.q\"]");
  f("residual_offload",
    &S::residual_offload,
    "What layers hand on, the residual sum and its snapshots, waits in host memory from its use in "
    "forward to its use in backward; copies go beside the computing, and the bits are the same.");
  f("offload",
    &S::offload,
    "Name patterns of activations that wait in host memory likewise, of those that are kept.")
      .one_or_list()
      .default_is("[] (none)")
      .example("[\"mlp_block.normed\", \"attn.*\"]");
  f("piece_tokens",
    &S::piece_tokens,
    "Layers work off a micro-batch in equal pieces of at most so many tokens, one after the other, "
    "each layer all of them before the next: what a layer needs in between is that of a piece. "
    "The model that is trained is the same; sums are formed in another order. Of use with "
    "sequences that do not fit otherwise; 0 = whole.")
      .at_least(0)
      .example("32768");
}

void ExpertsConfig::describe(Fields<ExpertsConfig>& f) {
  using S = ExpertsConfig;
  f("offload",
    &S::offload,
    "What of the experts lives outside device memory and passes through caches there: nothing "
    "(none), optimizer states and masters (states), or these, weights and gradients (full). The "
    "values "
    "are the same; docs/memory.md says what it costs. memory.device_budget, memory.host_budget and "
    "memory.file_budget say where what goes. eval and generate, which have weights alone, do "
    "likewise with full, where these do not all fit on the device.")
      .example("full");
  f("policy",
    &S::policy,
    "Which experts stay in the caches on the device: those that the schedule of a step needs "
    "soonest "
    "(sched), that were used last (lru), the same ones always (static), or any (random, from "
    "run.seed; "
    "for tests). The values are the same.")
      .example("lru");
  f("update",
    &S::update,
    "When offloaded experts are updated: once the norm of all gradients is known (after_step), or "
    "layer by "
    "layer in the step's last backward (in_backward), so that the gradients of two layers are all "
    "that there are at a "
    "time: 12 bytes a parameter instead of 16 with AdamW, and none of them crosses the link. The "
    "values are the same. in_backward needs experts.offload: full, optimizer.clip_grad_norm: 0, "
    "parallel.order: vertical (or one micro-batch a step), and ranks that share experts through "
    "parallel.ep alone; a step whose gradients are not finite "
    "ends the run (exit code 5) instead of being skipped.")
      .example("in_backward");
  f("device_cache",
    &S::device_cache,
    "Device memory for the caches of offloaded experts together, per rank. null = what "
    "memory.device_budget "
    "leaves beside the rest of the run, or without a budget what the GPU has free; on a CPU, where "
    "neither is known, room for all of them.")
      .in(Unit::bytes)
      .above(0)
      .example("24GiB");
  f("touch_log",
    &S::touch_log,
    "File in which rank 0 writes which of its experts every step uses, for bench cache-sim --log; "
    "a relative path lies in the run's folder. Needs experts.offload: full. null = none.")
      .in(Unit::path)
      .example("touches.jsonl");
  f("place_every",
    &S::place_every,
    "Steps after which the experts of a layer are dealt anew to the nodes and ranks of "
    "parallel.ep, "
    "so that ranks have equally much to do by the average load of the experts; weights and "
    "optimizer "
    "state move with them. Nothing moves where less than a hundredth of the busiest rank's or "
    "node's load "
    "would be won. The model that is trained is the same; 0 = experts stay in order.")
      .between(0, kMaxCount)
      .example("500");
  f("place_decay",
    &S::place_decay,
    "Share of the past in the average load of an expert: average = place_decay x average + (1 - "
    "place_decay) x its share of the step's choices.")
      .at_least(0)
      .below(1);
  f("replicas",
    &S::replicas,
    "Slots of every rank and layer for copies of busy experts of other ranks of its node, filled "
    "anew "
    "every place_every steps after experts were dealt; tokens take turns among an expert's copies "
    "by their "
    "number. A copy has weights and gradients, no optimizer state; its gradients are added at "
    "home. "
    "Needs place_every; of use where several ranks of parallel.ep share a node.")
      .between(0, 64)
      .example("1");
}

void MemoryConfig::describe(Fields<MemoryConfig>& f) {
  using S = MemoryConfig;
  f("device_budget",
    &S::device_budget,
    "Ceiling of device memory per rank, everything included. A run that needs more does not start; "
    "with experts.offload the caches get what the rest leaves. null = what the device has.")
      .in(Unit::bytes)
      .above(0)
      .example("72GiB");
  f("host_budget",
    &S::host_budget,
    "Ceiling of host memory per rank for what experts.offload puts there (pinned for a GPU), with "
    "offloaded activations beside it. null = what the system says is available at the start, in "
    "equal parts for the ranks of a machine.")
      .in(Unit::bytes)
      .above(0)
      .example("100GiB");
  f("file_budget",
    &S::file_budget,
    "Ceiling of the file per rank in which experts live that memory.host_budget does not hold: "
    "optimizer states first, then weights. Needs file_path. null = no file.")
      .in(Unit::bytes)
      .above(0)
      .example("400GiB");
  f("file_path",
    &S::file_path,
    "Folder of that file, on a fast local disk. What lies there is scratch: nothing of it is "
    "needed after "
    "the run or to resume it. Needs file_budget.")
      .in(Unit::path)
      .example("/scratch/moesaic");
  f("verify_reads",
    &S::verify_reads,
    "Compares a checksum of everything that is read from that file; a wrong one ends the run.");
}

void CheckpointConfig::describe(Fields<CheckpointConfig>& f) {
  using S = CheckpointConfig;
  f("every", &S::every, "Steps between checkpoints; 0 = none on the way.")
      .between(0, kMaxCount)
      .example("500");
  f("keep_last", &S::keep_last, "Newest checkpoints to keep; 0 = all.").between(0, kMaxCount);
  f("keep_every",
    &S::keep_every,
    "Checkpoints at multiples of so many steps are never deleted; 0 = no such rule.")
      .between(0, kMaxCount);
  f("async",
    &S::async,
    "Training goes on while a checkpoint is written, from a copy of the state in rank 0's host "
    "memory. The files are the same either way.");
  f("on_error",
    &S::on_error,
    "A checkpoint that cannot be written (disk full or broken): stop = the run ends with exit code "
    "4; continue = it says so and goes on with the checkpoints that it has. The last save of a run "
    "always has to succeed.");
  f("save_at_end", &S::save_at_end, "A checkpoint after the last step.");
  f("load_weights",
    &S::load_weights,
    "A new run starts from the weights of this checkpoint: PATH of a run or of one of its step-… "
    "folders, or PATH@STEP. Nothing else is taken from there: step, data and optimizer start anew. "
    "A run that continues from a checkpoint of its own takes no notice; null = initial weights "
    "from run.seed.")
      .in(Unit::path)
      .example("runs/pretrained@20000");
}

void CommConfig::describe(Fields<CommConfig>& f) {
  using S = CommConfig;
  f("ranks_per_node",
    &S::ranks_per_node,
    "Consecutive ranks that share a node; lets ranks of one machine pose as nodes of so many. With "
    "comm.share_gpu posed nodes of GPUs meet through the network.")
      .between(1, kMaxRanks)
      .default_is("null (from the launcher)");
  f("watchdog_s",
    &S::watchdog_s,
    "Time in which no rank gets on, after which the run ends with exit code 124 and names the rank "
    "that is behind; 0 = never. Longer than the time in which mpirun notices a dead link "
    "(docs/reliability.md).")
      .in(Unit::seconds)
      .at_least(0);
  f("first_step_s",
    &S::first_step_s,
    "The same for what may take long: starting, loading, saving, and the first step.")
      .in(Unit::seconds)
      .at_least(0);
  f("reduction",
    &S::reduction,
    "How gradients of several ranks are added: in the order of the ranks, whatever the size of the "
    "pieces and the library's algorithm (ordered), or as the library does it (library).");
  f("share_gpu",
    &S::share_gpu,
    "Several ranks may use one GPU, in turns; for tests, since it is slow.");
}

void LogConfig::describe(Fields<LogConfig>& f) {
  using S = LogConfig;
  f("interval", &S::interval, "Steps between log lines.")
      .between(1, kMaxCount)
      .also({"log_interval"});
  f("detail_every",
    &S::detail_every,
    "Steps between the lines `moe` (load of experts and ranks, bias of the routers, times of the "
    "exchange) and `mem`, and the records of the same in metrics.jsonl; 0 = never.")
      .between(0, kMaxCount);
  f("expert_every",
    &S::expert_every,
    "Steps between records of the tokens of every expert of every layer, in metrics.jsonl and for "
    "TensorBoard (histograms and a heat map); 0 = never. A record takes about 6 bytes per expert "
    "and layer.")
      .between(0, kMaxCount);
  f("peak_tflops",
    &S::peak_tflops,
    "Dense peak of a GPU (or of a rank on a CPU) in TFLOP/s, against which the utilisation (MFU) "
    "is counted; null = the published peak of the GPU where it is known, else no MFU. The header "
    "says which.")
      .above(0)
      .example("989");
  f("metrics", &S::metrics, "Write metrics.jsonl in the run's folder, one object per step.");
  f("tensorboard",
    &S::tensorboard,
    "Write event files for TensorBoard to tensorboard/ in the run's folder.");
  f("prometheus",
    &S::prometheus,
    "Text file for Prometheus, rewritten as the run goes on: true = metrics.prom in the run's "
    "folder, or a path that ends in .prom, or a folder (of node_exporter's textfile collector), "
    "where the file takes its name from the run's folder; null or false = none.")
      .in(Unit::path)
      .example("/var/lib/node_exporter/textfile");
  f("trace_steps",
    &S::trace_steps,
    "Steps whose ops are written with their times to trace/step-N.rankR.json in the run's folder, "
    "for "
    "Perfetto or chrome://tracing. A traced step is slower.")
      .between(1, kMaxCount)
      .example("[10, 100]");
}

void DebugConfig::describe(Fields<DebugConfig>& f) {
  using S = DebugConfig;
  f("inject_nan_step",
    &S::inject_nan_step,
    "Makes the gradient of this step non-finite, to see that the step is skipped; null = never.")
      .between(1, kMaxCount);
  f("immediate_streams",
    &S::immediate_streams,
    "CPU streams run each operation at once on the calling thread.");
  f("nvtx",
    &S::nvtx,
    "Marks ops, layers and phases as NVTX ranges for a profiler of the CUDA toolkit; needs "
    "run.device=cuda.");
}

}  // namespace moesaic::config
