#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace moesaic::tokenizer {

/// (left id, right id) -> (rank, merged id), in an open-addressed table: one or two cache lines per question.
class PairTable {
 public:
  struct Entry {
    std::int32_t left = -1, right = -1;
    std::int32_t rank = 0, merged = 0;
  };
  void reserve(std::size_t pairs);
  /// False when the pair is there already; it then stays as it was.
  bool insert(const Entry& entry);
  const Entry* find(std::int32_t left, std::int32_t right) const noexcept;

 private:
  std::size_t slot(std::int32_t left, std::int32_t right) const noexcept;
  std::vector<Entry> entries_;  // a power of two
  std::size_t used_ = 0;
};

/// A vocabulary of byte strings and the merges between them.
struct BpeModel {
  std::vector<std::string> tokens;  ///< bytes by id; empty = the id is no token of the model
  std::array<std::int32_t, 256> byte_ids{};
  PairTable merges;
  /// A word that is a token is that token, whatever the merges make of it.
  bool whole_words_first = false;
  std::unordered_map<std::string_view, std::int32_t>
      words;  ///< into `tokens`; for whole_words_first
};

/// Byte-pair encoding of words: starting from single bytes, the adjacent pair of the lowest rank (the leftmost of
/// several) becomes one token, until no pair has a merge. Holds the working memory of one thread, and the results of
/// recent short words. A word of n bytes costs O(n log n).
class BpeMerger {
 public:
  explicit BpeMerger(const BpeModel& model);
  ~BpeMerger();
  void encode(std::string_view word, std::vector<std::int32_t>& out);

 private:
  struct CachedWord;
  void merge(std::string_view word, std::vector<std::int32_t>& out);
  void merge_short(std::string_view word, std::vector<std::int32_t>& out) const;
  void merge_long(std::string_view word, std::vector<std::int32_t>& out);

  /// A token of a long word being merged; they form a list.
  struct Symbol {
    std::int32_t id;  // -1 = merged into its left neighbour
    std::int32_t previous, next;
  };
  /// A merge that may be due; stale when one of its symbols has changed meanwhile.
  struct Candidate {
    std::int32_t rank, left, left_id, right_id;
  };

  const BpeModel& model_;
  std::vector<CachedWord> cache_;
  std::size_t merged_ = 0;  // short words that were not in the cache
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
};

}  // namespace moesaic::tokenizer
