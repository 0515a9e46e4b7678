#include "core/data/dataset.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>

#include <unistd.h>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/data/permutation.h"
#include "tests/support/catch.h"

namespace moesaic::data {
namespace {

// A file that lives as long as the object.
class TextFile {
 public:
  TextFile(const std::string& name, const std::string& text)
      : path_((std::filesystem::temp_directory_path() /
               ("moesaic_" + std::to_string(::getpid()) + "_" + name))
                  .string()) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TextFile() { std::filesystem::remove(path_); }
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// `n` documents of 1 … 90 random bytes that are neither 0 nor a line end nor a form feed.
std::vector<std::string> random_documents(int n) {
  std::vector<std::string> docs;
  for (int d = 0; d < n; ++d) {
    const auto key = static_cast<std::uint64_t>(d) + 5;
    std::string s(1 + static_cast<std::size_t>(uniform(key, 0) * 90), ' ');
    for (std::size_t i = 0; i < s.size(); ++i)
      s[i] = static_cast<char>(33 + uniform(key, i + 1) * 200);
    docs.push_back(s);
  }
  return docs;
}
std::string joined(const std::vector<std::string>& docs) {
  std::string text;
  for (const auto& d : docs)
    text += d + "\n\f\n";
  return text;
}
std::shared_ptr<const TokenSource> open(const TextFile& file) {
  return open_text(file.path());
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const InputError& e) {
    return e.what();
  }
  return "no InputError";
}

TEST_CASE("a form feed alone on a line separates documents") {
  const TextFile file("sep", "\f\none\n\f\n\f\ntwo \f in a line\n\fx\nstill two\n\f");
  const auto source = open(file);
  REQUIRE(source->num_documents() == 2);
  const auto text = [&](std::int64_t d) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source->document_length(d)));
    source->read(d, 0, tokens);
    REQUIRE(tokens.back() == kEndOfText);
    return text_of_tokens(tokens);
  };
  REQUIRE(text(0) == "one\n");
  REQUIRE(text(1) == "two \f in a line\n\fx\nstill two\n");
  REQUIRE(source->num_tokens() == 5 + 30);
  const TextFile plain("plain", "no separator");
  REQUIRE(open(plain)->num_documents() == 1);
}

TEST_CASE("files that are not text are refused with file and offset") {
  REQUIRE_THROWS_AS(open_text("/nonexistent/train.txt"), InputError);
  REQUIRE(error_of([] {
            open_text("/nonexistent/train.txt");
          }).find("/nonexistent/train.txt: cannot open") == 0);
  REQUIRE_THROWS_AS(open_text(std::filesystem::temp_directory_path().string()), InputError);
  const TextFile empty("empty", "");
  REQUIRE(error_of([&] { open(empty); }) == empty.path() + ": the file is empty");
  const TextFile separators("separators", "\f\n\f\n");
  REQUIRE_THROWS_AS(open(separators), InputError);
  const TextFile zero("zero", std::string("abc\0def", 7));
  REQUIRE(error_of([&] { open(zero); }).find(zero.path() + ":3: a zero byte") == 0);
  const TextFile high("high", "ab\xc3\xa4");
  REQUIRE(error_of([&] { open_text(high.path(), 128); }).find(high.path() + ":2: token id 195") ==
          0);
  const TextFile few("few",
                     "12345");  // with the end token six tokens: one window of five, none of six
  REQUIRE_NOTHROW(PackedDataset(open(few), 1, 0, 5));
  REQUIRE(error_of([&] { PackedDataset(open(few), 1, 0, 6); }).find("fewer than one window") !=
          std::string::npos);
  REQUIRE_THROWS_AS(ValidationSet(open(few), 6, 1), InputError);
}

TEST_CASE("a keyed permutation is a bijection that depends on its key") {
  for (const std::int64_t n : {1, 2, 3, 5, 16, 17, 1000, 4097}) {
    std::set<std::int64_t> seen;
    const KeyedPermutation p(n, 11);
    for (std::int64_t i = 0; i < n; ++i)
      seen.insert(p(i));
    REQUIRE(seen.size() == static_cast<std::size_t>(n));
    REQUIRE((*seen.begin() == 0 && *seen.rbegin() == n - 1));
  }
  const KeyedPermutation a(1000, 1), b(1000, 2);
  int equal = 0, neighbours = 0;
  for (std::int64_t i = 0; i + 1 < 1000; ++i) {
    equal += a(i) == b(i) ? 1 : 0;
    neighbours += std::abs(a(i) - a(i + 1)) == 1 ? 1 : 0;
  }
  REQUIRE(equal < 10);       // one expected
  REQUIRE(neighbours < 15);  // two expected
  const KeyedPermutation large(std::int64_t{1} << 40, 3);
  REQUIRE(large(123456789) != large(123456790));
}

TEST_CASE("a sample is a pure function of seed, phase, length and index") {
  const TextFile file("pure", joined(random_documents(60)));
  const auto source = open(file);
  const PackedDataset one(source, 7, 0, 32), two(source, 7, 0, 32), other_seed(source, 8, 0, 32),
      other_phase(source, 7, 1, 32);
  const auto n = one.samples_per_epoch();
  int same_seed = 0, same_phase = 0, same_epoch = 0;
  for (std::int64_t g = 3 * n - 1; g >= 0; --g)
    two.batch({g, 1});  // another history
  for (std::int64_t g = 0; g < 3 * n; ++g) {
    const auto a = one.batch({g, 1}), b = two.batch({g, 1});
    REQUIRE((a.tokens == b.tokens && a.labels == b.labels && a.cu == b.cu));
    same_seed += a.tokens == other_seed.batch({g, 1}).tokens ? 1 : 0;
    same_phase += a.tokens == other_phase.batch({g, 1}).tokens ? 1 : 0;
    same_epoch += a.tokens == one.batch({g + n, 1}).tokens ? 1 : 0;
  }
  REQUIRE((same_seed < 5 && same_phase < 5 && same_epoch < 5));
}

TEST_CASE("ranks share a global batch without changing it") {
  const TextFile file("ranks", joined(random_documents(60)));
  const PackedDataset data(open(file), 7, 0, 16);
  const std::int64_t global = 12;
  for (std::int64_t step = 0; step < 20; ++step) {  // crosses epochs
    const auto whole = data.batch({step * global, global});
    for (const int ranks : {1, 2, 3, 4, 12}) {
      std::vector<std::int32_t> tokens, labels, cu{0};
      std::int64_t valid = 0;
      for (int r = 0; r < ranks; ++r) {
        const auto part = data.batch(share_of_rank(step * global, global, r, ranks));
        for (std::size_t i = 1; i < part.cu.size(); ++i)
          cu.push_back(part.cu[i] + static_cast<std::int32_t>(tokens.size()));
        tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
        labels.insert(labels.end(), part.labels.begin(), part.labels.end());
        valid += part.valid_labels;
      }
      REQUIRE((tokens == whole.tokens && labels == whole.labels && cu == whole.cu &&
               valid == whole.valid_labels));
    }
  }
  REQUIRE_THROWS_AS(share_of_rank(0, 12, 0, 5), UsageError);
}

// Every document is one letter of its own, so that a token tells its document.
TEST_CASE("no label, position or boundary crosses documents") {
  std::vector<std::string> docs;
  for (int d = 0; d < 40; ++d)
    docs.push_back(std::string(static_cast<std::size_t>(3 + d % 11), static_cast<char>(64 + d)));
  std::string text;
  for (const auto& d : docs)
    text += d + "\f\n";
  // "…\f\n" is not alone on its line: the letters run on.
  const TextFile wrong("wrong", text);
  REQUIRE(open(wrong)->num_documents() == 1);
  const TextFile file("letters", joined(docs));
  const PackedDataset data(open(file), 3, 0, 24);
  std::int64_t ends = 0;
  for (std::int64_t g = 0; g < data.samples_per_epoch(); ++g) {
    const auto b = data.batch({g, 1});
    REQUIRE((b.cu.front() == 0 && b.cu.back() == 24));
    std::int64_t valid = 0;
    for (std::size_t d = 0; d + 1 < b.cu.size(); ++d) {
      REQUIRE(b.cu[d] < b.cu[d + 1]);
      const auto letter = [&](std::int32_t token) { return token >= 64; };
      std::set<std::int32_t> letters;
      for (auto t = static_cast<std::size_t>(b.cu[d]); t < static_cast<std::size_t>(b.cu[d + 1]);
           ++t) {
        REQUIRE(b.positions[t] == static_cast<std::int32_t>(t) - b.cu[d]);
        if (letter(b.tokens[t])) letters.insert(b.tokens[t]);
        const bool last_of_document = b.tokens[t] == kEndOfText;
        REQUIRE((b.labels[t] == kIgnoredLabel) == last_of_document);
        if (last_of_document) {
          ++ends;
          REQUIRE(t + 1 == static_cast<std::size_t>(b.cu[d + 1]));
        } else {
          ++valid;
          if (letter(b.labels[t])) letters.insert(b.labels[t]);
          if (t + 1 < 24) REQUIRE(b.labels[t] == b.tokens[t + 1]);
        }
      }
      REQUIRE(letters.size() <= 1);
    }
    REQUIRE(b.valid_labels == valid);
  }
  REQUIRE(ends > 30);
}

TEST_CASE("an epoch shows every token once") {
  const auto docs = random_documents(50);
  const TextFile file("epoch", joined(docs));
  const auto source = open(file);
  const std::int64_t length = 20;
  const PackedDataset data(source, 3, 0, length);
  const std::int64_t n = data.samples_per_epoch();
  REQUIRE(n == (source->num_tokens() - 1) / length);
  std::map<std::int32_t, std::int64_t> in_file, seen;
  for (std::int64_t d = 0; d < source->num_documents(); ++d) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source->document_length(d)));
    source->read(d, 0, tokens);
    for (const auto t : tokens)
      ++in_file[t];
  }
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    seen.clear();
    const auto all = data.batch({epoch * n, n});
    for (const auto t : all.tokens)
      ++seen[t];
    std::int64_t missing = 0;
    for (const auto& [token, count] : in_file) {
      REQUIRE(seen[token] <= count);
      missing += count - seen[token];
    }
    REQUIRE(missing == source->num_tokens() - n * length);  // the tail, at most one window
    REQUIRE(missing <= length);
    // Neighbouring samples of a batch are not neighbours in the text.
    int followed = 0;
    for (std::int64_t g = 0; g + 1 < n; ++g) {
      const auto end = static_cast<std::size_t>((g + 1) * length) - 1;
      followed += all.labels[end] == all.tokens[end + 1] ? 1 : 0;
    }
    REQUIRE(followed < n / 4);
  }
}

TEST_CASE("the validation set is fixed, in file order and spread over the file") {
  const TextFile file("valid", joined(random_documents(50)));
  const auto source = open(file);
  const ValidationSet all(source, 16, 1000000), some(source, 16, 10);
  REQUIRE(all.num_samples() == (source->num_tokens() - 1) / 16);
  REQUIRE(some.num_samples() == 10);
  std::int64_t last = -1;
  for (std::int64_t k = 0; k < 10; ++k) {
    const auto b = some.batch({k, 1});
    std::int64_t found = -1;
    for (std::int64_t w = 0; w < all.num_samples(); ++w) {
      if (all.batch({w, 1}).tokens == b.tokens) found = w;
    }
    REQUIRE(found > last);
    REQUIRE(found == k * all.num_samples() / 10);
    last = found;
  }
  // Batches keep their size at the end of the set.
  const auto rest = some.batch({8, 4}), last_two = some.batch({8, 2});
  REQUIRE(rest.num_samples == 4);
  REQUIRE(rest.tokens.size() == 4 * 16);
  REQUIRE(rest.valid_labels == last_two.valid_labels);
  REQUIRE(std::equal(last_two.labels.begin(), last_two.labels.end(), rest.labels.begin()));
  REQUIRE(std::all_of(rest.labels.begin() + 2 * 16, rest.labels.end(), [](std::int32_t label) {
    return label == kIgnoredLabel;
  }));
  REQUIRE(rest.cu.back() == 4 * 16);
  REQUIRE_THROWS_AS(some.batch({10, 1}), InternalError);
  const auto whole = all.batch({0, all.num_samples()});
  for (std::size_t i = 0; i + 1 < whole.tokens.size(); ++i) {
    if (whole.labels[i] != kIgnoredLabel) REQUIRE(whole.labels[i] == whole.tokens[i + 1]);
  }
}

}  // namespace
}  // namespace moesaic::data
