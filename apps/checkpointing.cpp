#include "apps/checkpointing.h"

#include <chrono>

#include <fmt/format.h>

#include "core/checkpoint/checkpoint.h"

namespace moesaic::apps {

Checkpointing::Checkpointing(Parts parts) : parts_(std::move(parts)) {}

void Checkpointing::save() {
  if (last_saved_ == parts_.trainer->steps_done()) return;
  last_saved_ = parts_.trainer->steps_done();
  const auto start = std::chrono::steady_clock::now();
  // All ranks end alike: the first line of a message of rank 0, if writing failed.
  std::string failure;
  if (parts_.host->rank() == 0) {
    try {
      write();
    } catch (const ResourceError& e) {
      failure = e.what();
    }
  }
  parts_.host->broadcast_host(failure, 0);
  if (!failure.empty()) throw ResourceError(failure);
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Checkpointing::write() {
  Trainer& trainer = *parts_.trainer;
  const config::Config& config = parts_.loaded->config;
  const auto folder = checkpoints_of(config);
  save_checkpoint(folder,
                  last_saved_,
                  trainer.state(),
                  trainer.values(),
                  config::effective_yaml(*parts_.loaded),
                  config.checkpoint.keep_last,
                  config.checkpoint.keep_every,
                  trainer.stream());
  parts_.event("save", last_saved_, {});
  parts_.say(fmt::format("step {} | save {}", last_saved_, folder.string()));
}

std::filesystem::path checkpoints_of(const config::Config& config) {
  return std::filesystem::path(config.run.dir) / "checkpoints";
}

double checkpoint_bytes(const Trainer& trainer) {
  double bytes = 0;
  for (const StateTensor& t : trainer.state())
    bytes += static_cast<double>(t.bytes());
  return bytes;
}

}  // namespace moesaic::apps
