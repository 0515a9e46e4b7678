#include "core/tokenizer/bpe.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/random.h"

namespace moesaic::tokenizer {
namespace {

constexpr std::size_t kShortWord = 48;  // bytes; below, looking at all pairs beats a heap
constexpr std::size_t kFirstCacheWords = 64, kMostCacheWords = std::size_t{1} << 15;
constexpr std::int32_t kNoRank = std::numeric_limits<std::int32_t>::max();

std::uint64_t hash_of(std::string_view word) noexcept {
  std::uint64_t h = word.size() * 0x9E3779B97F4A7C15ULL;
  std::size_t at = 0;
  for (std::uint64_t part; at < word.size(); at += sizeof part) {
    part = 0;
    std::memcpy(&part, word.data() + at, std::min(sizeof part, word.size() - at));
    h = mix64(h ^ part);
  }
  return h;
}

}  // namespace

std::size_t PairTable::slot(std::int32_t left, std::int32_t right) const noexcept {
  const std::uint64_t key = static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
                            static_cast<std::uint32_t>(right);
  return static_cast<std::size_t>((key * 0x9E3779B97F4A7C15ULL) >> 20) & (entries_.size() - 1);
}

void PairTable::reserve(std::size_t pairs) {
  std::size_t size = 16;
  while (size < 2 * pairs)
    size *= 2;
  if (size <= entries_.size()) return;
  std::vector<Entry> old(size);
  old.swap(entries_);
  used_ = 0;
  for (const Entry& e : old) {
    if (e.left >= 0) insert(e);
  }
}

bool PairTable::insert(const Entry& entry) {
  if (2 * (used_ + 1) > entries_.size()) reserve(used_ + 1);
  std::size_t i = slot(entry.left, entry.right);
  for (; entries_[i].left >= 0; i = (i + 1) & (entries_.size() - 1)) {
    if (entries_[i].left == entry.left && entries_[i].right == entry.right) return false;
  }
  entries_[i] = entry;
  ++used_;
  return true;
}

const PairTable::Entry* PairTable::find(std::int32_t left, std::int32_t right) const noexcept {
  if (entries_.empty()) return nullptr;
  for (std::size_t i = slot(left, right); entries_[i].left >= 0;
       i = (i + 1) & (entries_.size() - 1)) {
    if (entries_[i].left == left && entries_[i].right == right) return &entries_[i];
  }
  return nullptr;
}

struct BpeMerger::CachedWord {
  static constexpr std::size_t kBytes = 32, kIds = 6;
  std::uint8_t bytes = 0, ids = 0;
  std::array<char, kBytes> word{};
  std::array<std::int32_t, kIds> id{};
};

BpeMerger::BpeMerger(const BpeModel& model) : model_(model), cache_(kFirstCacheWords) {}
BpeMerger::~BpeMerger() = default;

void BpeMerger::encode(std::string_view word, std::vector<std::int32_t>& out) {
  if (word.size() > CachedWord::kBytes) return merge(word, out);
  if (word.size() <= 1) {
    for (const char c : word)
      out.push_back(model_.byte_ids[static_cast<unsigned char>(c)]);
    return;
  }
  CachedWord& cached = cache_[static_cast<std::size_t>(hash_of(word)) % cache_.size()];
  if (cached.bytes == word.size() &&
      std::memcmp(cached.word.data(), word.data(), word.size()) == 0) {
    out.insert(out.end(), cached.id.begin(), cached.id.begin() + cached.ids);
    return;
  }
  const std::size_t before = out.size();
  merge(word, out);
  const std::size_t count = out.size() - before;
  if (++merged_ > cache_.size() && cache_.size() < kMostCacheWords) {
    // A short text is done with a small cache, which costs little to make; the words of a long one come again.
    cache_ = std::vector<CachedWord>(8 * cache_.size());
    return;
  }
  if (count > CachedWord::kIds) return;
  cached.bytes = static_cast<std::uint8_t>(word.size());
  cached.ids = static_cast<std::uint8_t>(count);
  std::copy(word.begin(), word.end(), cached.word.begin());
  std::copy(out.end() - static_cast<std::ptrdiff_t>(count), out.end(), cached.id.begin());
}

void BpeMerger::merge(std::string_view word, std::vector<std::int32_t>& out) {
  if (model_.whole_words_first) {
    if (const auto found = model_.words.find(word); found != model_.words.end()) {
      out.push_back(found->second);
      return;
    }
  }
  if (word.size() <= kShortWord) {
    merge_short(word, out);
  } else {
    merge_long(word, out);
  }
}

void BpeMerger::merge_short(std::string_view word, std::vector<std::int32_t>& out) const {
  std::array<std::int32_t, kShortWord> id;
  std::array<const PairTable::Entry*, kShortWord> merge;  // of id[i] and id[i + 1]
  std::size_t count = word.size();
  const auto look_up = [&](std::size_t i) {
    merge[i] = i + 1 < count ? model_.merges.find(id[i], id[i + 1]) : nullptr;
  };
  for (std::size_t i = 0; i < count; ++i)
    id[i] = model_.byte_ids[static_cast<unsigned char>(word[i])];
  for (std::size_t i = 0; i < count; ++i)
    look_up(i);
  while (count > 1) {
    std::size_t best = count;
    std::int32_t rank = kNoRank;
    for (std::size_t i = 0; i + 1 < count; ++i) {
      if (merge[i] != nullptr && merge[i]->rank < rank) {
        rank = merge[i]->rank;
        best = i;
      }
    }
    if (best == count) break;
    id[best] = merge[best]->merged;
    --count;
    for (std::size_t i = best + 1; i < count; ++i) {
      id[i] = id[i + 1];
      merge[i] = merge[i + 1];
    }
    look_up(best);
    if (best > 0) look_up(best - 1);
  }
  out.insert(out.end(), id.begin(), id.begin() + static_cast<std::ptrdiff_t>(count));
}

void BpeMerger::merge_long(std::string_view word, std::vector<std::int32_t>& out) {
  if (word.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
    throw InputError(fmt::format("a word of {} bytes; at most 2 GiB are encoded", word.size()));
  const auto count = static_cast<std::int32_t>(word.size());
  symbols_.clear();
  heap_.clear();
  for (std::int32_t i = 0; i < count; ++i) {
    symbols_.push_back(
        {model_.byte_ids[static_cast<unsigned char>(word[static_cast<std::size_t>(i)])],
         i - 1,
         i + 1 < count ? i + 1 : -1});
  }
  const auto at = [this](std::int32_t i) -> Symbol& {
    return symbols_[static_cast<std::size_t>(i)];
  };
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank > b.rank || (a.rank == b.rank && a.left > b.left);
  };
  const auto candidate = [&](std::int32_t left) -> bool {
    if (left < 0 || at(left).next < 0) return false;
    const std::int32_t a = at(left).id, b = at(at(left).next).id;
    const auto* merge = model_.merges.find(a, b);
    if (merge == nullptr) return false;
    heap_.push_back({merge->rank, left, a, b});
    return true;
  };
  for (std::int32_t i = 0; i + 1 < count; ++i)
    candidate(i);
  std::make_heap(heap_.begin(), heap_.end(), later);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    const Candidate c = heap_.back();
    heap_.pop_back();
    Symbol& left = at(c.left);
    if (left.id != c.left_id || left.next < 0 || at(left.next).id != c.right_id) continue;
    Symbol& right = at(left.next);
    left.id = model_.merges.find(c.left_id, c.right_id)->merged;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) at(left.next).previous = c.left;
    if (candidate(c.left)) std::push_heap(heap_.begin(), heap_.end(), later);
    if (candidate(left.previous)) std::push_heap(heap_.begin(), heap_.end(), later);
  }
  for (std::int32_t i = 0; i >= 0; i = at(i).next)
    out.push_back(at(i).id);
}

}  // namespace moesaic::tokenizer
