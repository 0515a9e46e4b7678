#include "core/data/document_bound.h"

#include <algorithm>
#include <memory>

#include "core/data/dataset.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

class Lengths : public TokenSource {
 public:
  explicit Lengths(std::vector<std::int64_t> lengths) : lengths_(std::move(lengths)) {}
  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(lengths_.size());
  }
  std::int64_t document_length(std::int64_t d) const override {
    return lengths_[static_cast<std::size_t>(d)];
  }
  void read(std::int64_t d, std::int64_t begin, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = begin + static_cast<std::int64_t>(i) == document_length(d) - 1 ? kEndOfText : 7;
  }
  const std::string& name() const noexcept override { return name_; }

 private:
  std::vector<std::int64_t> lengths_;
  std::string name_ = "lengths";
};

std::int64_t most_seen(const std::shared_ptr<const TokenSource>& source,
                       std::int64_t samples,
                       std::int64_t length) {
  std::int64_t most = 0;
  for (int phase = 0; phase < 4; ++phase) {
    const PackedDataset set(source, 5, phase, length);
    for (std::int64_t first = 0; first < 60; ++first)
      most = std::max(most, static_cast<std::int64_t>(set.batch({first, samples}).cu.size()) - 1);
  }
  const ValidationSet held_out(source, length, 1000);
  for (std::int64_t first = 0; first < held_out.num_samples(); first += samples)
    most =
        std::max(most, static_cast<std::int64_t>(held_out.batch({first, samples}).cu.size()) - 1);
  return most;
}

}  // namespace

TEST_CASE("no batch holds more documents than the bound, and the bound is not far away") {
  const std::vector<std::vector<std::int64_t>> sources{{400},
                                                       {2, 2, 2, 2, 2, 200, 300},
                                                       std::vector<std::int64_t>(300, 2),
                                                       {90, 31, 44, 17, 60, 5},
                                                       std::vector<std::int64_t>(50, 40)};
  for (const auto& lengths : sources) {
    const auto source = std::make_shared<Lengths>(lengths);
    for (const std::int64_t length : {7, 32, 64}) {
      for (const std::int64_t samples : {1, 3, 8}) {
        INFO(lengths.size() << " documents, " << samples << " of " << length);
        const std::int64_t bound = DocumentBound(*source).in(samples, length);
        CHECK(most_seen(source, samples, length) <= bound);
        CHECK(bound <= samples * length);
      }
    }
  }
  // Long documents: two cut ones per window, not one document per token.
  CHECK(DocumentBound(Lengths({4000, 5000})).in(4, 512) == 8);
  CHECK(DocumentBound(64).in(4, 4096) == 4 * 4096 / 64 + 8);
}

}  // namespace moesaic::data
