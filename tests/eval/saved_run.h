#pragma once
// Models from checkpoints of small runs.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "apps/loaded_model.h"
#include "core/checkpoint/checkpoint.h"
#include "core/data/dataset.h"
#include "core/data/document_bound.h"
#include "core/data/open_data.h"
#include "tests/train/run.h"

namespace moesaic::apps::test {

using moesaic::test::Run;

// The checkpoint of a run of a few steps, and a file of questions, gone with this object.
class Saved {
 public:
  explicit Saved(const std::vector<std::string>& overrides, int steps = 2)
      : run(moesaic::test::hybrid_config(overrides)) {
    std::filesystem::create_directories(folder_);
    run.steps(steps);
  }
  ~Saved() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::filesystem::path save() {
    const std::int64_t step = run.trainer->steps_done();
    save_checkpoint(folder_,
                    step,
                    run.trainer->state(),
                    run.trainer->values(),
                    "",
                    0,
                    0,
                    run.trainer->stream());
    return list_checkpoints(folder_).back().path;
  }
  std::string questions(const std::string& text) const {
    std::ofstream(folder_ / "quiz.jsonl") << text;
    return (folder_ / "quiz.jsonl").string();
  }
  Run run;

 private:
  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("moesaic_scorer_" + std::to_string(getpid()));
};

inline std::unique_ptr<LoadedModel> load(const config::Config& config,
                                         const std::filesystem::path& checkpoint,
                                         std::vector<LoadedModel::Window> windows,
                                         bool average = false) {
  return std::make_unique<LoadedModel>(
      config,
      LoadedModel::Options{
          .checkpoint = checkpoint, .average = average, .device = kCpu, .windows = windows});
}

// A data set's windows, and what batches of them look like.
struct Held {
  explicit Held(const config::Config& config)
      : source(data::open_tokens(config.data.train, config)),
        windows(source, config.data.sequence_length, std::numeric_limits<std::int64_t>::max()),
        micro(config.train.micro_batch_size),
        window{.tokens = micro * config.data.sequence_length,
               .longest = config.data.sequence_length,
               .documents = data::DocumentBound(*source).in(micro, config.data.sequence_length)} {}
  std::shared_ptr<const data::TokenSource> source;
  data::ValidationSet windows;
  std::int64_t micro;
  LoadedModel::Window window;
};

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

}  // namespace moesaic::apps::test
