#include <array>
#include <cstdio>
#include <string>

#include <sys/wait.h>

#include "tests/support/catch.h"

namespace {

int run(const std::string& arguments, std::string& output) {
  FILE* pipe = popen((MOESAIC_BINARY " " + arguments + " 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    output.append(buffer.data(), n);
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("cli: bench ops in every type") {
  for (const std::string dtype : {"f32", "bf16", "f64"}) {
    std::string output;
    CHECK(run("bench ops --only rms_norm --dtype " + dtype, output) == 0);
    CHECK(contains(output, dtype + ", 1 thread"));
    CHECK(contains(output, "gated_rms_norm_backward"));
    CHECK(!contains(output, "adamw"));
  }
  std::string output;
  CHECK(run("bench ops --only grouped_glu_forward", output) == 0);
  CHECK(contains(output, "grouped_glu_forward"));
  CHECK(!contains(output, "backward"));
  output.clear();
  CHECK(run("bench ops --only no_such_op", output) == 2);
  CHECK(contains(output, "no case's name contains this"));
}

TEST_CASE("cli: bench step shows every kind of op that ran") {
  std::string output;
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  CHECK(run("bench step --steps 1 --json " + config +
                " train.global_batch_size=1 train.micro_batch_size=1 data.sequence_length=64",
            output) == 0);
  for (const std::string part : {"\"tokens_per_step\": 64",
                                 "\"kda_chunk_backward\"",
                                 "\"muon_update\"",
                                 "\"share_of_sgemm\""}) {
    CAPTURE(part);
    CHECK(contains(output, part));
  }
  output.clear();
  CHECK(run("bench step --steps 5000 " + config, output) == 2);
  CHECK(contains(output, "train.steps is 500"));
}
