// Blends: shares, interleaving, epochs of their own, and that a sample depends on its number alone.
#include "core/data/blend.h"

#include <cmath>
#include <map>
#include <set>

#include "tests/data/files.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

// Documents whose tokens tell the set, the document and the place: 1000 set + 100 + document, then places.
class Marked : public TokenSource {
 public:
  Marked(int set, std::vector<std::int64_t> lengths)
      : set_(set), lengths_(std::move(lengths)), name_("set " + std::to_string(set)) {}
  std::int64_t num_documents() const noexcept override {
    return static_cast<std::int64_t>(lengths_.size());
  }
  std::int64_t document_length(std::int64_t d) const override {
    return lengths_[static_cast<std::size_t>(d)];
  }
  void read(std::int64_t d, std::int64_t begin, std::span<std::int32_t> out) const override {
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<std::int32_t>((set_ << 20) + (d << 10) + begin +
                                         static_cast<std::int64_t>(i));
  }
  const std::string& name() const noexcept override { return name_; }

 private:
  int set_;
  std::vector<std::int64_t> lengths_;
  std::string name_;
};

int set_of(std::int32_t token) {
  return token >> 20;
}

}  // namespace

TEST_CASE("a blend keeps every share at every moment") {
  const std::vector<std::vector<double>> blends{
      {1, 1}, {0.7, 0.2, 0.1}, {5, 1, 1, 1, 3, 2, 9}, {0.999999, 1e-6}, {1e-6, 1, 1e6}, {1}};
  for (const auto& weights : blends) {
    double all = 0;
    for (const double w : weights)
      all += w;
    const double depth = std::ceil(std::log2(static_cast<double>(weights.size())));
    for (const std::uint64_t seed : {1, 2}) {
      const BlendOrder order(weights, seed, 0);
      std::vector<std::int64_t> drawn(weights.size(), 0);
      for (std::int64_t g = 0; g < 20000; ++g) {
        if (g % 997 == 0) REQUIRE(order.counts(g) == drawn);
        const auto place = order(g);
        REQUIRE(place.index == drawn[place.set]++);  // without gaps, in order
        for (std::size_t i = 0; i < weights.size(); ++i) {
          const double share = static_cast<double>(g + 1) * weights[i] / all;
          REQUIRE(std::abs(static_cast<double>(drawn[i]) - share) <= depth);
        }
      }
    }
  }
  // The far end of a long run, exactly.
  const BlendOrder order({2, 1}, 3, 1);
  const std::int64_t far = (std::int64_t{1} << 61) + 12345;
  const auto before = order.counts(far), after = order.counts(far + 1);
  const auto place = order(far);
  CHECK(after[place.set] == before[place.set] + 1);
  CHECK(place.index == before[place.set]);
  CHECK(before[0] + before[1] == far);
}

TEST_CASE(
    "few samples of an uneven blend are drawn without error, and a share of nothing is refused") {
  // What others answered with an index beyond the end.
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const BlendOrder order({0.999999, 1e-6}, seed, 0);
    const auto counts = order.counts(3);
    CHECK(counts[0] + counts[1] == 3);
    CHECK(counts[1] <= 1);
    for (std::int64_t g = 0; g < 3; ++g)
      order(g);
  }
  CHECK_THROWS_AS(BlendOrder({1, 1e-30}, 1, 0), UsageError);
  // Which sample the rare set gets is the seed's choice, not always the first.
  std::set<std::int64_t> places;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const BlendOrder order({99, 1}, seed, 0);
    std::int64_t g = 0;
    while (order(g).set == 0)
      ++g;
    places.insert(g);
  }
  CHECK(places.size() > 10);
}

TEST_CASE("every data set of a blend has epochs of its own, without repetition in one") {
  const std::int64_t length = 8;
  Blend blend(std::vector<WeightedSource>{
      {std::make_shared<Marked>(1, std::vector<std::int64_t>(30, 20)), 3},
      {std::make_shared<Marked>(2, std::vector<std::int64_t>{50, 1, 0, 33, 17}), 1},
      {std::make_shared<Marked>(3, std::vector<std::int64_t>(10, 9)), 2}});
  const BlendedDataset data(blend, 7, 0, length);
  const BlendedDataset again(blend, 7, 0, length);
  std::vector<std::int64_t> per_epoch{0};
  for (const auto& set : blend.sets)
    per_epoch.push_back(num_windows(set.source, length));
  std::map<int, std::vector<std::vector<std::int32_t>>>
      drawn;  // labels and tokens of each set, in order
  const std::int64_t samples = 400;
  for (std::int64_t g = samples - 1; g >= 0; --g)
    again.batch({g, 1});  // another history
  for (std::int64_t g = 0; g < samples; ++g) {
    const Batch b = data.batch({g, 1});
    REQUIRE(b.tokens == again.batch({g, 1}).tokens);
    for (const auto token : b.tokens)
      REQUIRE(set_of(token) == set_of(b.tokens[0]));  // a sample is of one set
    for (std::size_t t = 0; t < b.tokens.size(); ++t) {
      if (b.labels[t] != kIgnoredLabel) REQUIRE(b.labels[t] == b.tokens[t] + 1);  // of one document
    }
    drawn[set_of(b.tokens[0])].push_back(b.tokens);
  }
  const auto use = data.use(samples);
  for (int set = 1; set <= 3; ++set) {
    const auto& windows = drawn[set];
    INFO("set " << set << ": " << windows.size() << " windows, "
                << per_epoch[static_cast<std::size_t>(set)]);
    CHECK(use[static_cast<std::size_t>(set) - 1].samples ==
          static_cast<std::int64_t>(windows.size()));
    const auto n = static_cast<std::size_t>(per_epoch[static_cast<std::size_t>(set)]);
    REQUIRE(windows.size() > 2 * n);  // several epochs
    for (std::size_t begin = 0; begin + n <= windows.size(); begin += n) {
      std::set<std::int32_t> seen;
      std::size_t tokens = 0;
      for (std::size_t w = begin; w < begin + n; ++w) {
        seen.insert(windows[w].begin(), windows[w].end());
        tokens += windows[w].size();
      }
      CHECK(seen.size() == tokens);  // every token of the set at most once
    }
    // The order of documents is another in the next epoch: the cuts fall elsewhere.
    CHECK(std::set(windows.begin(), windows.begin() + static_cast<std::ptrdiff_t>(n)) !=
          std::set(windows.begin() + static_cast<std::ptrdiff_t>(n),
                   windows.begin() + static_cast<std::ptrdiff_t>(2 * n)));
  }
}

TEST_CASE("a blend of one is that data set, and ranks share a batch of a blend") {
  const auto one = std::make_shared<Marked>(1, std::vector<std::int64_t>(30, 20));
  const auto two = std::make_shared<Marked>(2, std::vector<std::int64_t>(9, 31));
  const PackedDataset plain(one, 5, 2, 16);
  const BlendedDataset single(Blend(one), 5, 2, 16);
  CHECK(plain.batch({3, 40}).tokens == single.batch({3, 40}).tokens);
  const BlendedDataset both(Blend(std::vector<WeightedSource>{{one, 1}, {two, 1}}), 5, 2, 16);
  const Batch whole = both.batch({24, 12});
  std::vector<std::int32_t> parts;
  for (int r = 0; r < 3; ++r) {
    const Batch b = both.batch(share_of_rank(24, 12, r, 3));
    parts.insert(parts.end(), b.tokens.begin(), b.tokens.end());
  }
  CHECK(parts == whole.tokens);
  CHECK_THROWS_AS(
      BlendedDataset(Blend(std::vector<WeightedSource>{{one, 1}, {two, 1}}), 5, 2, 5000),
      InputError);
}

TEST_CASE("empty documents and documents of one token have no label and cross nothing") {
  const auto source =
      std::make_shared<Marked>(1, std::vector<std::int64_t>{0, 1, 0, 0, 1, 5, 0, 1, 4, 0});
  CHECK(source->num_tokens() == 12);
  const PackedDataset data(source, 3, 0, 11);
  REQUIRE(data.samples_per_epoch() == 1);
  for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
    const Batch b = data.batch({epoch, 1});
    REQUIRE(b.cu.back() == 11);
    std::int64_t valid = 0;
    for (std::size_t d = 0; d + 1 < b.cu.size(); ++d) {
      REQUIRE(b.cu[d] < b.cu[d + 1]);
      for (auto t = static_cast<std::size_t>(b.cu[d]); t < static_cast<std::size_t>(b.cu[d + 1]);
           ++t) {
        CHECK((b.tokens[t] >> 10) == (b.tokens[static_cast<std::size_t>(b.cu[d])] >> 10));
        valid += b.labels[t] != kIgnoredLabel ? 1 : 0;
        if (b.labels[t] != kIgnoredLabel) CHECK(b.labels[t] == b.tokens[t] + 1);
      }
    }
    CHECK(b.valid_labels == valid);
    CHECK((valid == 6 ||
           valid == 7));  // 4 + 3, less one where the last token of the stream is a label only
  }
  CHECK(has(input_error([&] { PackedDataset(source, 3, 0, 12); }),
            "12 tokens in 10 documents, fewer than one window"));
}

TEST_CASE("more documents than one prefix sum covers are found in any order") {
  std::vector<std::int64_t> lengths;
  for (std::int64_t d = 0; d < 1000; ++d)
    lengths.push_back(d % 7 == 0 ? 0 : 1 + d % 13);
  const auto source = std::make_shared<Marked>(1, lengths);
  const PackedDataset data(source, 3, 0, 7);
  std::set<std::int32_t> seen;
  for (std::int64_t g = 0; g < data.samples_per_epoch(); ++g) {
    for (const auto token : data.batch({g, 1}).tokens)
      REQUIRE(seen.insert(token).second);
  }
  CHECK(static_cast<std::int64_t>(seen.size()) == data.samples_per_epoch() * 7);
  CHECK(source->num_tokens() - static_cast<std::int64_t>(seen.size()) <= 7);
}

}  // namespace moesaic::data
