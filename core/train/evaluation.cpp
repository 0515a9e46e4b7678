#include "core/train/evaluation.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/error.h"

namespace moesaic {
namespace {

// What a batch adds; moved between ranks as bytes.
struct BatchLoss {
  double sum = 0;
  std::int64_t labels = 0;
};

// Element r: the batches r, r + ranks, … in order.
std::vector<std::vector<BatchLoss>> gather(const std::vector<BatchLoss>& own, Communicator* world) {
  if (world == nullptr || world->size() == 1) return {own};
  const std::string bytes(reinterpret_cast<const char*>(own.data()),
                          own.size() * sizeof(BatchLoss));
  std::vector<std::vector<BatchLoss>> all;
  for (const std::string& of_rank : world->all_gather_host(bytes)) {
    MOESAIC_CHECK(of_rank.size() % sizeof(BatchLoss) == 0, "part of a batch's loss");
    auto& losses = all.emplace_back(of_rank.size() / sizeof(BatchLoss));
    if (!losses.empty()) std::memcpy(losses.data(), of_rank.data(), of_rank.size());
  }
  return all;
}

}  // namespace

EvalStats evaluate_windows(const data::ValidationSet& windows,
                           std::int64_t micro,
                           Communicator* world,
                           bool in_step,
                           const std::function<double(const data::Batch&)>& loss_of,
                           Progress* progress) {
  const int rank = world != nullptr ? world->rank() : 0,
            ranks = world != nullptr ? world->size() : 1;
  const std::int64_t batches = (windows.num_samples() + micro - 1) / micro;
  if (progress != nullptr) progress->set_total((batches - rank + ranks - 1) / ranks);
  std::vector<BatchLoss> own;
  for (std::int64_t b = rank; b < batches; b += ranks) {
    const data::Batch batch = windows.batch({b * micro, micro});
    own.push_back({loss_of(batch), batch.valid_labels});
    if (progress != nullptr) progress->add(1);
  }
  const std::int64_t rounds = (batches + ranks - 1) / ranks;
  if (in_step && static_cast<std::int64_t>(own.size()) < rounds) loss_of(windows.batch({0, micro}));
  const auto all = gather(own, world);
  EvalStats stats;
  double sum = 0;
  for (std::int64_t b = 0; b < batches; ++b) {
    const BatchLoss& loss =
        all[static_cast<std::size_t>(b % ranks)].at(static_cast<std::size_t>(b / ranks));
    sum += loss.sum;
    stats.predicted_tokens += loss.labels;
  }
  stats.loss = sum / static_cast<double>(std::max<std::int64_t>(1, stats.predicted_tokens));
  return stats;
}

}  // namespace moesaic
