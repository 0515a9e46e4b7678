#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/nn/choices.h"
#include "memory/buffer.h"

namespace moesaic::apps::selftest {

/// What a run on one rank chose (experts of tokens, keys of queries), by step, layer and micro-batch.
class ChoiceRecord {
 public:
  struct Rows {
    std::int64_t tokens = 0, k = 0;
    std::vector<std::int32_t> values;  ///< [tokens, k]
  };
  void add(int step, const std::string& layer, std::int64_t micro_batch, Rows rows);
  /// Throws InternalError when the run made no such choice.
  const Rows& at(int step, const std::string& layer, std::int64_t micro_batch) const;
  /// Of the longest choice of a layer.
  std::size_t most_bytes() const;
  /// For other processes.
  std::string bytes() const;
  static ChoiceRecord read(const std::string& bytes);

 private:
  std::map<std::tuple<int, std::string, std::int64_t>, Rows> rows_;
};

/// Writes down what one rank chooses.
class ChoiceRecorder final : public ChoiceObserver {
 public:
  explicit ChoiceRecorder(ChoiceRecord& to) : to_(to) {}
  void begin_step(int step) { step_ = step; }
  ConstTensorView replace(const Choice& choice, Stream& stream) override;

 private:
  ChoiceRecord& to_;
  int step_ = 0;
};

/// Puts the choices of a record in the place of a rank's own, and counts where these differ. What ranks choose alike counts
/// once, on the rank with `counts_shared`. All of its memory on `device` is taken at once: within a step that could wait for
/// exchanges which wait for this rank.
class ChoiceReplay final : public ChoiceObserver {
 public:
  ChoiceReplay(const ChoiceRecord& record, Device device, bool counts_shared)
      : record_(record),
        counts_shared_(counts_shared),
        given_(record.most_bytes(), device, "given choices") {}
  void begin_step(int step) { step_ = step; }
  ConstTensorView replace(const Choice& choice, Stream& stream) override;
  std::int64_t choices() const noexcept { return choices_; }
  std::int64_t differing() const noexcept { return differing_; }

 private:
  const ChoiceRecord& record_;
  bool counts_shared_;
  int step_ = 0;
  std::int64_t choices_ = 0, differing_ = 0;
  Buffer given_;
};

/// Entries of `own` [rows, k] that are not in the same row of `other`; -1 is none.
std::int64_t count_differing(const std::vector<std::int32_t>& own,
                             const std::int32_t* other,
                             std::int64_t k);

}  // namespace moesaic::apps::selftest
