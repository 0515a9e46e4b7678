#include "core/train/step_record.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/base/error.h"

namespace moesaic {

ExpertLoad expert_load(std::vector<std::int64_t> tokens) {
  ExpertLoad load;
  double sum = 0, most = 0, information = 0;
  for (const std::int64_t n : tokens) {
    sum += static_cast<double>(n);
    most = std::max(most, static_cast<double>(n));
    load.dead_experts += n == 0 ? 1 : 0;
  }
  const auto experts = static_cast<double>(tokens.size());
  if (sum > 0) {
    load.max_over_mean = most * experts / sum;
    for (const std::int64_t n : tokens) {
      const double share = static_cast<double>(n) / sum;
      if (n > 0) information -= share * std::log(share);
    }
    load.entropy = tokens.size() > 1 ? information / std::log(experts) : 1;
  }
  load.tokens = std::move(tokens);
  return load;
}

void add_ranks(ExpertLoad& load, const ExpertCopies& copies) {
  load.rank_tokens = rank_tokens(load.tokens, copies);
  load.rank_max_over_mean =
      max_over_mean(std::vector<double>(load.rank_tokens.begin(), load.rank_tokens.end()));
}

TierTraffic& TierTraffic::operator+=(const TierTraffic& more) {
  uses += more.uses;
  hits += more.hits;
  bytes_up += more.bytes_up;
  bytes_down += more.bytes_down;
  file_read += more.file_read;
  file_written += more.file_written;
  host_waits += more.host_waits;
  host_wait_seconds += more.host_wait_seconds;
  return *this;
}

TierTraffic operator-(TierTraffic now, const TierTraffic& before) {
  now.uses -= before.uses;
  now.hits -= before.hits;
  now.bytes_up -= before.bytes_up;
  now.bytes_down -= before.bytes_down;
  now.file_read -= before.file_read;
  now.file_written -= before.file_written;
  now.host_waits -= before.host_waits;
  now.host_wait_seconds -= before.host_wait_seconds;
  return now;
}

namespace {

// What of a load has a fixed size.
struct FixedPart {
  std::int64_t layer = 0, dead_experts = 0, counts = 0, ranks = 0;
  double max_over_mean = 0, entropy = 0, bias_min = 0, bias_max = 0, of_ranks = 0;
  std::int64_t has_bias = 0, has_passes = 0, passes = 0, has_ranks = 0;
};

}  // namespace

void write_expert_load(std::string& bytes, const ExpertLoad& load) {
  const FixedPart part{.layer = load.layer,
                       .dead_experts = load.dead_experts,
                       .counts = static_cast<std::int64_t>(load.tokens.size()),
                       .ranks = static_cast<std::int64_t>(load.rank_tokens.size()),
                       .max_over_mean = load.max_over_mean,
                       .entropy = load.entropy,
                       .bias_min = load.bias_min.value_or(0),
                       .bias_max = load.bias_max.value_or(0),
                       .of_ranks = load.rank_max_over_mean.value_or(0),
                       .has_bias = load.bias_min ? 1 : 0,
                       .has_passes = load.further_passes ? 1 : 0,
                       .passes = load.further_passes.value_or(0),
                       .has_ranks = load.rank_max_over_mean ? 1 : 0};
  bytes.append(reinterpret_cast<const char*>(&part), sizeof part);
  for (const auto* list : {&load.tokens, &load.rank_tokens})
    bytes.append(reinterpret_cast<const char*>(list->data()), list->size() * sizeof(std::int64_t));
}

ExpertLoad read_expert_load(const std::string& bytes, std::size_t& at) {
  const auto get = [&](void* to, std::size_t n) {
    MOESAIC_CHECK(at + n <= bytes.size(), "part of an expert load");
    if (n > 0) std::memcpy(to, bytes.data() + at, n);
    at += n;
  };
  FixedPart part;
  get(&part, sizeof part);
  ExpertLoad load;
  load.layer = part.layer;
  load.dead_experts = part.dead_experts;
  load.max_over_mean = part.max_over_mean;
  load.entropy = part.entropy;
  if (part.has_bias != 0) {
    load.bias_min = part.bias_min;
    load.bias_max = part.bias_max;
  }
  if (part.has_passes != 0) load.further_passes = part.passes;
  if (part.has_ranks != 0) load.rank_max_over_mean = part.of_ranks;
  load.tokens.resize(static_cast<std::size_t>(part.counts));
  load.rank_tokens.resize(static_cast<std::size_t>(part.ranks));
  for (auto* list : {&load.tokens, &load.rank_tokens})
    get(list->data(), list->size() * sizeof(std::int64_t));
  return load;
}

}  // namespace moesaic
