#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <sys/wait.h>

#include "tests/support/catch.h"

namespace {

struct Result {
  int code = -1;
  std::string output;
};

/// Runs the executable through the shell. `streams`: redirections, such as "2>&1"; `before`: what stands before its name.
Result moesaic(const std::string& arguments,
               const std::string& streams = "2>&1",
               const std::string& before = "") {
  Result result;
  FILE* pipe = popen((before + MOESAIC_BINARY " " + arguments + " " + streams).c_str(), "r");
  REQUIRE(pipe);
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    result.output.append(buffer.data(), n);
  }
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("cli: without a command the help is printed and the code is 2") {
  const Result result = moesaic("");
  CHECK(result.code == 2);
  CHECK(contains(result.output, "explain"));
  CHECK(moesaic("", "2>/dev/null").output.empty());
}

TEST_CASE("cli: help, version, and an example for every verb") {
  CHECK(moesaic("--help").code == 0);
  const Result version = moesaic("--version");
  for (const std::string line : {"moesaic 0.", "\ngit ", "\ncompiler ", "\nCUDA "})
    CHECK(contains(version.output, line));
  for (const std::string verb :
       {"train",     "resume",    "ckpt",          "plan",        "generate",
        "eval",      "schema",    "explain",       "verify",      "bench",
        "doctor",    "data",      "report",        "selftest",    "ckpt ls",
        "ckpt diff", "bench a2a", "data tokenize", "data sample", "selftest layouts"}) {
    CAPTURE(verb);
    const Result help = moesaic(verb + " --help");
    CHECK(help.code == 0);
    CHECK(contains(help.output, "\nExample"));
    CHECK(contains(help.output, "moesaic " + verb));
  }
}

TEST_CASE("cli: eval says what its progress is") {
  const Result help = moesaic("eval --help");
  CHECK(contains(help.output, "How far loading and scoring are, on stderr"));
  CHECK(contains(help.output, "Standard output holds the result and nothing else"));
  CHECK_FALSE(contains(help.output, "log.interval"));  // there are no steps
  CHECK_FALSE(contains(help.output, "--color"));
}

TEST_CASE("cli: unknown commands and options") {
  const Result verb = moesaic("explian x");
  CHECK(verb.code == 2);
  CHECK(contains(verb.output, "unknown command 'explian'; did you mean 'explain'?"));
  CHECK(moesaic("schema --jsn").code == 2);
  CHECK(moesaic("--versoin").code == 2);
}

TEST_CASE("cli: schema and explain") {
  const Result schema = moesaic("schema", "2>/dev/null");
  CHECK(schema.code == 0);
  CHECK(contains(schema.output, "\"num_experts_per_token\""));
  const Result key = moesaic("explain model.num_experts", "2>/dev/null");
  CHECK(key.code == 0);
  CHECK(contains(key.output, "Routed experts per MoE layer"));
  for (const char* section :
       {"run", "model", "train", "optimizer", "log"}) {  // train is a verb, too
    const Result r = moesaic(std::string("explain ") + section, "2>&1");
    INFO(section);
    CHECK(r.code == 0);
    CHECK(contains(r.output, section));
  }
  const Result unknown = moesaic("explain model.num_expert", "2>&1 >/dev/null");
  CHECK(unknown.code == 2);
  CHECK(unknown.output ==
        "moesaic: model.num_expert: unknown key; did you mean model.num_experts?\n");
}

TEST_CASE("cli: plan") {
  const std::string config = MOESAIC_SOURCE_DIR "/configs/";
  const Result tables = moesaic("plan " + config + "kimi_linear_48b.yaml");
  CHECK(tables.code == 0);
  CHECK(contains(tables.output, "49,122,681,728"));
  CHECK(contains(tables.output, "2 x active parameters"));
  const Result fits = moesaic("plan " + config + "quickstart.yaml --device-memory 1GiB");
  CHECK(contains(fits.output, "within 1.00 GiB: activations.recompute=none computes least again"));
  CHECK(contains(fits.output, "  none *"));
  CHECK(contains(moesaic("plan " + config + "quickstart.yaml --device-memory 1MiB").output,
                 "within 1.00 MiB: no setting fits; full needs"));
  const Result size = moesaic("plan " + config + "quickstart.yaml --device-memory 1Gb");
  CHECK(size.code == 2);
  CHECK(contains(size.output, "--device-memory 1Gb: is no size; write for example 80GiB"));
  CHECK(contains(moesaic("plan " + config + "quickstart.yaml --device-memory=-1").output,
                 "--device-memory -1: is negative"));
  for (const std::string size : {"0", "0GiB", "0.0GiB"}) {
    const Result nothing = moesaic("plan " + config + "quickstart.yaml --device-memory " + size);
    INFO(nothing.output);
    CHECK(nothing.code == 2);
    CHECK(contains(
        nothing.output,
        "--device-memory " + size + ": a device has more than that; write for example 80GiB"));
  }
  const Result beyond = moesaic("plan " + config + "quickstart.yaml --device-memory 99999999TiB");
  CHECK(beyond.code == 2);
  CHECK(contains(beyond.output, "--device-memory 99999999TiB: out of range"));
  CHECK(moesaic("plan " + config + "quickstart.yaml --device-memory ''").code == 2);
  for (const std::string least :
       {"0", "1073741825", "1099511627776", "99999999999999999999", "x"}) {
    const Result document = moesaic("plan " + config + "quickstart.yaml --least-document " + least);
    INFO(document.output);
    CHECK(document.code == 2);
    CHECK(contains(document.output,
                   "--least-document: Value " + least + " not in range 1 to 1073741824"));
  }
  CHECK(moesaic("plan " + config + "quickstart.yaml --least-document 1073741824").code == 0);
  CHECK(contains(moesaic("plan " + config + "deepseek_v32.yaml --device-memory 80GiB").output,
                 "what cannot be trained yet has no plan of its memory"));
  const Result nan = moesaic("bench cache-sim --steps 3 --zipf nan");
  CHECK(nan.code == 2);
  CHECK(contains(nan.output, "nan is not a number from 0 to 10"));
  const Result json = moesaic("plan --json " + config + "kimi_k3.yaml", "2>/dev/null");
  CHECK(json.code == 0);
  CHECK(contains(json.output, "\"total\": 2779484478208"));
  CHECK(contains(json.output, "\"active\": 104189614848"));
  CHECK(contains(moesaic("plan " + config + "deepseek_v32.yaml").output,
                 "note: model.rope_scaling: "));
  const Result effective =
      moesaic("plan --effective " + config + "quickstart.yaml optimizer.lr=1e-2", "2>/dev/null");
  CHECK(effective.code == 0);
  CHECK(contains(effective.output, "# command line"));
}

TEST_CASE("cli: plan shows a pipeline, train wants its ranks") {
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml parallel.pp=2 ";
  const std::string zero_bubble =
      config + "parallel.schedule=zero_bubble train.micro_batch_size=2 ";
  const Result tables = moesaic("plan " + zero_bubble);
  CHECK(tables.code == 0);
  CHECK(contains(tables.output,
                 "Pipeline: zero_bubble (ZB-H1), 2 stages x 1 chunk, 4 micro-batches"));
  CHECK(contains(tables.output, "\nrank 0 F0 F1 .  B0 "));
  const Result csv = moesaic("plan " + zero_bubble + "--schedule csv", "2>/dev/null");
  CHECK(csv.code == 0);
  CHECK(csv.output.rfind("rank,action,start,end,work,", 0) == 0);
  const Result json = moesaic("plan " + zero_bubble + "--schedule json", "2>/dev/null");
  CHECK(json.code == 0);
  CHECK(contains(json.output, "\"backward_weight\""));
  CHECK(contains(moesaic("plan --json " + config).output, "\"schedule\": \"1f1b\""));
  CHECK(contains(moesaic("plan --schedule grid " + config).output, "rank 1 .  F0 B0 B0"));
  const Result none =
      moesaic("plan --schedule grid " MOESAIC_SOURCE_DIR "/configs/quickstart.yaml", "2>&1");
  CHECK(none.code == 2);
  CHECK(contains(none.output, "there is no pipeline"));
  CHECK(moesaic("plan --schedule bitmap " + config).code == 2);
  const Result layers = moesaic("plan " + config + "parallel.layers=[3,2]", "2>&1 >/dev/null");
  CHECK(layers.code == 2);
  CHECK(contains(layers.output,
                 "command line: parallel.layers: [3, 2] are 5 layers, but the model has 4"));
  const Result train = moesaic(
      "train " + config, "2>&1", "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ");
  CHECK(train.code == 2);
  CHECK(contains(train.output, "pp"));
}

TEST_CASE("cli: plan lists every problem") {
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  const Result keys =
      moesaic("plan " + config + " model.hidden_sise=8 train.steps=x", "2>&1 >/dev/null");
  CHECK(keys.code == 2);
  CHECK(contains(keys.output, "model.hidden_size"));
  CHECK(contains(keys.output, "train.steps"));
  CHECK(contains(keys.output, "2 problems"));
  const Result phases =
      moesaic("plan " + config + " 'train.phases=[{until: 500, freeze: [nothing_like_this]}]'",
              "2>&1 >/dev/null");
  CHECK(phases.code == 2);
  CHECK(contains(phases.output, "the pattern 'nothing_like_this' matches no parameter"));
  CHECK(moesaic("plan " + config + " --json --effective").code == 2);
}

TEST_CASE("cli: a golden result of another shape fails, though it has as many elements") {
  namespace fs = std::filesystem;
  std::string pattern = (fs::temp_directory_path() / "moesaic-verify-XXXXXX").string();
  REQUIRE(mkdtemp(pattern.data()) != nullptr);
  const fs::path folder = pattern, name = "short_conv__zero.safetensors";
  std::stringstream text;
  text << std::ifstream(fs::path(MOESAIC_SOURCE_DIR) / "tests/golden" / name, std::ios::binary)
              .rdbuf();
  const auto verify = [&](const std::string& content) {
    std::ofstream(folder / name, std::ios::binary) << content;
    return moesaic("verify --cases " + folder.string());
  };
  std::string content = text.str();
  CHECK(verify(content).code == 0);
  const std::string before = R"("out.y":{"dtype":"F64","shape":[10,5])",
                    after = R"("out.y":{"dtype":"F64","shape":[5,10])";
  REQUIRE(contains(content, before));
  content.replace(content.find(before), before.size(), after);
  const Result reshaped = verify(content);
  CHECK(reshaped.code == 1);
  CHECK(contains(reshaped.output, "'out.y' has shape [10, 5], stored is [5, 10]"));
  fs::remove_all(folder);
}

TEST_CASE("cli: verify wants stored cases or large ones, not both") {
  for (const std::string arguments : {"", " --large --cases " MOESAIC_SOURCE_DIR "/tests/golden"}) {
    const Result result = moesaic("verify" + arguments);
    CHECK(result.code == 2);
    CHECK(contains(result.output, "--large"));
  }
  CHECK(moesaic("verify --large --dtype f16").code == 2);
  CHECK(moesaic("verify --large --path tiled").code == 2);
}

TEST_CASE("cli: a negative seed is refused") {
  const Result result = moesaic("generate nowhere --seed -1");
  CHECK(result.code == 2);
  CHECK(contains(result.output, "--seed"));
}

TEST_CASE("cli: recompute patterns that match nothing are refused") {
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  for (const std::string verb : {"plan", "bench step"}) {
    const Result result =
        moesaic(verb + " " + config + " activations.recompute=[moe.gateup]", "2>&1 >/dev/null");
    CHECK(result.code == 2);
    CHECK(contains(result.output, "'moe.gateup'; did you mean moe.gate_up?"));
  }
  const Result chosen =
      moesaic("plan " + config +
                  " 'activations.recompute=[moe.topk]' 'train.phases=[{until: 500, freeze: [no]}]'",
              "2>&1 >/dev/null");
  CHECK(chosen.code == 2);
  CHECK(contains(chosen.output, "command line: activations.recompute: 'moe.topk' names"));
  CHECK(contains(chosen.output, "train.phases[0].freeze"));
}

TEST_CASE("cli: output that cannot be written is an error") {
  const Result full = moesaic("schema", "2>&1 >/dev/full");
  CHECK(full.code == 4);
  CHECK(contains(full.output, "standard output could not be written"));
}

TEST_CASE("cli: a process that belongs to no MPI world is refused, and only where ranks matter") {
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  const auto under = [&](const std::string& variables, const std::string& arguments) {
    return moesaic(arguments, "2>&1", "env " + variables + " ");
  };
  const std::string allocation = "SLURM_JOB_ID=7 SLURM_NTASKS=2";
  const std::string step = allocation + " SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=";
  const Result alone = under(allocation, "train " + config);
  CHECK(alone.code == 2);
  CHECK(contains(alone.output, "inside a Slurm allocation for 2 tasks"));
  const Result first = under(step + "0", "train " + config);
  CHECK(first.code == 2);
  CHECK(contains(first.output, "srun --mpi=pmix -n 2"));
  const Result second = under(step + "1", "train " + config);
  CHECK(second.code == 2);
  CHECK(second.output.empty());  // one of them speaks
  const Result mpich = under("PMI_SIZE=2 PMI_RANK=0", "train " + config);
  CHECK(mpich.code == 2);
  CHECK(contains(mpich.output, "PMI_SIZE=2"));
  CHECK(under(allocation, "plan " + config).code == 0);
  // What has no ranks to share its work is done once.
  const Result explained = under(step + "0", "explain run.seed");
  CHECK(explained.code == 0);
  CHECK(contains(explained.output, "'explain' runs in one process: rank 0 of 2 does it (SLURM_"));
  CHECK(contains(explained.output, "run.seed"));
  const Result quiet = under(step + "1", "explain run.seed");
  CHECK(quiet.code == 0);
  CHECK(quiet.output.empty());
}

TEST_CASE("cli: doctor") {
  const std::string root = "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ";
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  const std::string temporary = std::filesystem::temp_directory_path().string();
  const Result text =
      moesaic("doctor " + config + " run.dir=" + temporary + "/not/there", "2>&1", root);
  CHECK(text.code == 0);
  for (const char* what :
       {"launch", "MPI", "CUDA", "locked memory", "open files", "shared memory", "disk", "room"})
    CHECK(contains(text.output, std::string(" ") + what + " "));
  CHECK(contains(text.output, "0 failed"));
  CHECK_FALSE(std::filesystem::exists(temporary + "/not"));
  const Result json = moesaic("doctor --json", "2>/dev/null", root);
  CHECK(json.code == 0);
  CHECK(contains(json.output, "\"ok\": true"));
  // A file where the folder should be.
  const Result file = moesaic("doctor " + config + " run.dir=" + config, "2>&1", root);
  CHECK(file.code == 2);
  CHECK(contains(file.output, "not a folder"));
  const Result lost = moesaic("doctor", "2>&1", "env SLURM_NTASKS=2 ");
  CHECK(lost.code == 2);
  CHECK(contains(lost.output, "fail  launch"));
  CHECK(contains(lost.output, "mpirun -np 2"));
  CHECK(contains(lost.output, "ok    MPI"));  // the rest is looked at all the same
  const Result ranks =
      moesaic("doctor", "2>&1", root + "mpirun -np 2 --oversubscribe --bind-to none ");
  CHECK(ranks.code == 0);
  CHECK(contains(ranks.output, "mpirun; 2 rank(s), 2 on this machine"));
  CHECK(contains(ranks.output, "ok    clocks"));
  CHECK(ranks.output.find("ok    MPI") == ranks.output.rfind("ok    MPI"));
  CHECK(moesaic("doctor no_such_file.yaml", "2>&1", root).code != 0);
}
