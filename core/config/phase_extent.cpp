#include "core/config/phase_extent.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace moesaic::config {
namespace {

constexpr std::int64_t kMostTokensPerStep = std::int64_t{1} << 50;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 62;
__extension__ using Wide = __int128;

std::int64_t times(std::int64_t a, std::int64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return product > kMostTokens ? kMostTokens : static_cast<std::int64_t>(product);
}

std::int64_t steps_for(std::int64_t tokens, std::int64_t per_step) {
  return tokens / per_step + (tokens % per_step != 0 ? 1 : 0);
}

class Derivation {
 public:
  Derivation(Config& config, std::set<std::string>& derived)
      : train_(config.train), data_(config.data), derived_(derived) {}

  std::vector<Finding> run() {
    missing_ends();
    batch();
    // Without a batch no number of tokens means a number of steps.
    if (!findings_.empty() || data_.sequence_length < 1) return std::move(findings_);
    train_.phases.empty() ? whole_run() : phases();
    return std::move(findings_);
  }

 private:
  void add(std::vector<std::string> keys, std::string message) {
    findings_.push_back({std::move(keys), std::move(message)});
  }
  static std::string key(std::size_t phase, const char* name) {
    return fmt::format("train.phases[{}]{}{}", phase, *name != 0 ? "." : "", name);
  }

  /// Every phase but the last ends by itself; the run ends by one of three keys.
  void missing_ends() {
    const auto has_end = [](const PhaseConfig& phase) {
      return phase.until > 0 || phase.until_tokens;
    };
    for (std::size_t i = 0; i + 1 < train_.phases.size(); ++i) {
      if (!has_end(train_.phases[i]))
        add({key(i, "until")}, "is required (or until_tokens); allowed: an integer, at least 1");
    }
    if (train_.steps > 0 || train_.tokens) return;
    if (train_.phases.empty())
      add({"train.steps", "train.tokens"},
          "is required (or train.tokens); allowed: an integer, at least 1");
    else if (!has_end(train_.phases.back()))
      add({"train.steps", "train.tokens"},
          "is required (or train.tokens, or an end of the last phase); allowed: an integer, at "
          "least "
          "1");
  }

  void batch() {
    if (!train_.global_batch_tokens) {
      if (train_.global_batch_size < 1)
        add({"train.global_batch_size", "train.global_batch_tokens"},
            "is required (or train.global_batch_tokens); allowed: an integer, at least 1");
    } else if (data_.sequence_length > 0) {
      const std::int64_t found = batch_of(data_.sequence_length, "data.sequence_length");
      if (train_.global_batch_size > 0 && found > 0 && train_.global_batch_size != found)
        add({"train.global_batch_size", "train.global_batch_tokens", "data.sequence_length"},
            fmt::format("found {}, but train.global_batch_tokens ({}) makes {} sequences of {} "
                        "tokens; remove one of the two",
                        train_.global_batch_size,
                        *train_.global_batch_tokens,
                        found,
                        data_.sequence_length));
      if (train_.global_batch_size < 1) {
        train_.global_batch_size = found;
        derived_.insert("train.global_batch_size");
      }
    }
    for (std::size_t i = 0; i < train_.phases.size(); ++i)
      phase_batch(i);
    if (times(train_.global_batch_size, data_.sequence_length) > kMostTokensPerStep)
      add({"train.global_batch_size", "data.sequence_length"},
          fmt::format("a step of {} sequences of {} tokens is too large; allowed: 2^50 tokens",
                      train_.global_batch_size,
                      data_.sequence_length));
  }

  void phase_batch(std::size_t i) {
    const PhaseConfig& phase = train_.phases[i];
    const std::int64_t length = phase.sequence_length.value_or(data_.sequence_length);
    if (train_.global_batch_tokens && phase.global_batch_size) {
      add({key(i, "global_batch_size"), "train.global_batch_tokens"},
          "train.global_batch_tokens decides it in every phase; remove one of the two");
    } else if (train_.global_batch_tokens && phase.sequence_length) {
      batch_of(length, key(i, "sequence_length"));
    }
    if (times(phase.global_batch_size.value_or(1), length) > kMostTokensPerStep)
      add({key(i, "global_batch_size"), key(i, "sequence_length"), "data.sequence_length"},
          fmt::format("a step of {} sequences of {} tokens is too large; allowed: 2^50 tokens",
                      *phase.global_batch_size,
                      length));
  }

  /// Sequences of a step; 0 after a finding.
  std::int64_t batch_of(std::int64_t length, const std::string& length_key) {
    const std::int64_t tokens = *train_.global_batch_tokens;
    if (tokens % length == 0) return tokens / length;
    const std::int64_t below = tokens / length * length;
    add({length_key, "train.global_batch_tokens"},
        fmt::format(
            "train.global_batch_tokens ({}) is no multiple of sequences of {} tokens. Nearest "
            "valid: {}{}",
            tokens,
            length,
            below > 0 ? fmt::format("{}, ", below) : "",
            below + length));
    return 0;
  }

  void whole_run() {
    const std::int64_t per_step = times(train_.global_batch_size, data_.sequence_length);
    if (train_.tokens && per_step > 0) end_at(steps_for(*train_.tokens, per_step));
  }

  /// The run has this many steps by its tokens.
  void end_at(std::int64_t steps) {
    if (train_.steps < 1) {
      train_.steps = steps;
      derived_.insert("train.steps");
    } else if (train_.steps != steps) {
      add({"train.steps", "train.tokens"},
          fmt::format("found {}, but train.tokens ({}) makes {} steps; remove one of the two",
                      train_.steps,
                      *train_.tokens,
                      steps));
    }
  }

  void phases() {
    std::int64_t begin = 0, tokens = 0;
    for (std::size_t i = 0; i < train_.phases.size(); ++i) {
      PhaseConfig& phase = train_.phases[i];
      const std::int64_t length = phase.sequence_length.value_or(data_.sequence_length);
      const std::int64_t per_step = times(batch_in(phase), length);
      if (per_step < 1) return;
      const bool last = i + 1 == train_.phases.size();
      if (phase.until_tokens) by_tokens(i, begin, tokens, per_step);
      if (last && train_.tokens && *train_.tokens > tokens)
        end_at(begin + steps_for(*train_.tokens - tokens, per_step));
      if (last && train_.tokens && *train_.tokens <= tokens)
        add({"train.tokens", "train.phases"},
            fmt::format(
                "found {}, but {} tokens have been seen when the last phase begins; allowed: more",
                *train_.tokens,
                tokens));
      if (phase.until < 1 && last && train_.steps > 0) {
        phase.until = train_.steps;
        derived_.insert(key(i, "until"));
      }
      if (phase.until < 1) return;  // its tokens made no sense
      if (last && train_.steps < 1) {
        train_.steps = phase.until;
        derived_.insert("train.steps");
      }
      if (phase.until <= begin) return;  // check() says so
      tokens = tokens + times(phase.until - begin, per_step);
      if (tokens > kMostTokens) tokens = kMostTokens;
      begin = phase.until;
    }
  }

  std::int64_t batch_in(const PhaseConfig& phase) const {
    if (train_.global_batch_tokens)
      return *train_.global_batch_tokens / phase.sequence_length.value_or(data_.sequence_length);
    return phase.global_batch_size.value_or(train_.global_batch_size);
  }

  void by_tokens(std::size_t i, std::int64_t begin, std::int64_t tokens, std::int64_t per_step) {
    PhaseConfig& phase = train_.phases[i];
    if (*phase.until_tokens <= tokens) {
      add({key(i, "until_tokens"), "train.phases"},
          fmt::format(
              "found {}, but {} tokens have been seen when this phase begins; allowed: more",
              *phase.until_tokens,
              tokens));
      return;
    }
    const std::int64_t until = begin + steps_for(*phase.until_tokens - tokens, per_step);
    if (phase.until > 0 && phase.until != until) {
      add({key(i, "until"), key(i, "until_tokens")},
          fmt::format("found {}, but until_tokens ({}) is step {}; remove one of the two",
                      phase.until,
                      *phase.until_tokens,
                      until));
    } else if (phase.until < 1) {
      phase.until = until;
      derived_.insert(key(i, "until"));
    }
  }

  TrainConfig& train_;
  const DataConfig& data_;
  std::set<std::string>& derived_;
  std::vector<Finding> findings_;
};

}  // namespace

std::vector<Finding> derive_steps(Config& config, std::set<std::string>& derived) {
  return Derivation(config, derived).run();
}

std::int64_t pieces_of_micro_batch(const Config& config, std::int64_t tokens) {
  const std::int64_t most = config.activations.piece_tokens,
                     ranks = std::max<std::int64_t>(1, config.parallel.tp);
  if (most <= 0 || tokens <= most) return 1;
  for (std::int64_t pieces = (tokens + most - 1) / most; tokens / pieces * 2 >= most; ++pieces)
    if (tokens % (pieces * ranks) == 0) return pieces;
  return 0;
}

std::vector<PhaseExtent> phase_extents(const Config& config) {
  const TrainConfig& train = config.train;
  std::vector<PhaseConfig> phases = train.phases;
  if (phases.empty()) phases.emplace_back().until = train.steps;
  std::vector<PhaseExtent> extents;
  PhaseExtent before;
  for (const PhaseConfig& phase : phases) {
    PhaseExtent p;
    p.begin = before.until;
    p.until = phase.until;
    p.first_token = extents.empty() ? 0 : before.end_token();
    p.sequence_length = phase.sequence_length.value_or(config.data.sequence_length);
    p.global_batch_size = train.global_batch_tokens
                              ? *train.global_batch_tokens / p.sequence_length
                              : phase.global_batch_size.value_or(train.global_batch_size);
    p.micro_batch_size = phase.micro_batch_size.value_or(train.micro_batch_size);
    extents.push_back(p);
    before = p;
  }
  return extents;
}

}  // namespace moesaic::config
