// Training on blends, on phases by tokens, and on conversations, whose steps have few and unevenly spread targets.
#include <cmath>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <unistd.h>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("moesaic_train_data_{}", getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

std::string repeated(const std::string& text, int n) {
  std::string all;
  for (int i = 0; i < n; ++i)
    all += fmt::format("{} {}\n\f\n", text, i);
  return all;
}

// Conversations with 1 to 30 targets each, most of them with one.
std::string conversations() {
  std::string text;
  for (int i = 0; i < 24; ++i) {
    text += fmt::format("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n",
                        std::string(static_cast<std::size_t>(10 + i % 7), 'q'),
                        std::string(i % 5 == 0 ? 30 : 1, static_cast<char>('a' + i)));
  }
  return text;
}

}  // namespace

TEST_CASE(
    "a run on a blend in several epochs and phases by tokens continues from every step with the "
    "same bits") {
  const Folder folder;
  const std::string large = folder.write("large.txt",
                                         repeated("the red fox sees a blue bird and runs", 40)),
                    small = folder.write("small.txt", repeated("1 2 3 4 5 6 7 8 9", 12));
  const auto config = hybrid_config(
      {"run.precision=f32",
       fmt::format(
           "data.train=[{{path: {}, weight: 0.6}}, {{path: {}, weight: 0.4}}]", large, small),
       "train.global_batch_tokens=256",
       "train.phases=[{until_tokens: 700}, {until_tokens: 1500, sequence_length: 128, "
       "micro_batch_size: 2}, "
       "{sequence_length: 32, micro_batch_size: 4}]"});
  CHECK((config.train.phases[0].until == 3 && config.train.phases[1].until == 6));
  constexpr int kSteps = 9;
  Run whole(config);
  std::vector<StepStats> stats;
  std::vector<Snapshot> states{whole.snapshot()};
  std::vector<StateValues> values{whole.trainer->values()};
  for (int k = 0; k < kSteps; ++k) {
    stats.push_back(whole.step());
    CHECK(stats.back().tokens == 256);
    states.push_back(whole.snapshot());
    values.push_back(whole.trainer->values());
  }
  for (std::size_t k = 0; k < kSteps; ++k) {
    INFO("continued after step " << k);
    Run part(config);
    part.restore(states[k], values[k]);
    for (std::size_t s = k; s < kSteps; ++s)
      CHECK(same_numbers(part.step(), stats[s]));
    CHECK(differences(part.snapshot(), states.back()).empty());
    CHECK(part.trainer->values().integers == values.back().integers);
    CHECK(part.trainer->values().texts == values.back().texts);
  }
  const auto use = whole.trainer->data_use();
  REQUIRE(use.size() == 2);
  CHECK(use[0].samples + use[1].samples == 3 * 4 + 3 * 2 + 3 * 8);
  CHECK(use[0].tokens + use[1].tokens == kSteps * 256);
  CHECK(use[1].epochs > 2);  // the small one came round
  CHECK(std::abs(static_cast<double>(use[1].samples) - 0.4 * 42) <= 3);
  // Other weights are another order of the data.
  auto other = config;
  other.data.train[0].weight = 0.5;
  Run changed(other);
  CHECK_THROWS_AS(changed.trainer->load_values(values[4]), UsageError);
}

TEST_CASE(
    "losses of conversations are means over the targets of the whole step, on any number of "
    "ranks") {
  const Folder folder;
  const std::string path = folder.write("chat.jsonl", conversations());
  const auto config = [&](int micro) {
    return hybrid_config({"run.precision=f64",
                          "data.train=" + path,
                          "train.global_batch_size=8",
                          fmt::format("train.micro_batch_size={}", micro)});
  };
  constexpr int kSteps = 3;
  const JobResult one = run_job(config(8), 1, kSteps);
  for (const auto& [ranks, micro] : {std::pair{1, 1}, std::pair{2, 2}, std::pair{4, 1}}) {
    INFO(ranks << " ranks, micro-batches of " << micro);
    const JobResult job = run_job(config(micro), ranks, kSteps);
    for (std::size_t s = 0; s < kSteps; ++s) {
      CHECK(std::abs(job.stats[s].loss - one.stats[s].loss) < 1e-10);
      CHECK(std::abs(job.stats[s].mtp_loss - one.stats[s].mtp_loss) < 1e-10);
      CHECK(std::abs(job.stats[s].grad_norm - one.stats[s].grad_norm) <
            1e-9 * one.stats[s].grad_norm);
    }
    std::string worst;
    const double error = largest_relative_error(job.states[0], one.states[0], worst);
    INFO(worst);
    CHECK(error < 1e-8);
  }
}

}  // namespace moesaic::test
