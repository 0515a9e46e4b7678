#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/data/batch.h"
#include "core/data/permutation.h"
#include "core/data/token_source.h"

namespace moesaic::data {

/// A source cut into windows of `sequence_length` tokens. Immutable, so usable from several threads.
class Windows {
 public:
  virtual ~Windows() = default;
  virtual std::int64_t count() const noexcept = 0;
  /// Adds window `window` as one sample.
  virtual void append(std::int64_t window, Batch& batch) const = 0;
};

/// Documents one after the other in an order given by a key (file order without), cut wherever a window ends: window w
/// holds tokens [w T, w T + T] of the stream, so that neighbouring windows share one token, which is a label in the first
/// and an input in the second. The rest, fewer than T labels, is left out. Needs one pass over the lengths and 8 bytes
/// for every 64 documents.
class CutWindows final : public Windows {
 public:
  CutWindows(std::shared_ptr<const TokenSource> source,
             std::optional<std::uint64_t> key,
             std::int64_t sequence_length);
  std::int64_t count() const noexcept override { return (tokens_ - 1) / sequence_length_; }
  void append(std::int64_t window, Batch& batch) const override;

 private:
  // One prefix sum for so many documents: little memory for millions of them, few steps to find one.
  static constexpr std::int64_t kStride = 64;
  std::int64_t document(std::int64_t place) const { return order_ ? (*order_)(place) : place; }
  void read(std::int64_t at, std::span<std::int32_t> out, std::span<char> ends) const;

  std::shared_ptr<const TokenSource> source_;
  std::int64_t sequence_length_;
  std::optional<KeyedPermutation> order_;
  std::vector<std::int64_t> start_;  // of every kStride-th document in the stream
  std::int64_t tokens_ = 0;
};

/// Whole documents, packed: a document lies in one window, with its first T tokens where it is longer, and a window's rest
/// is a document without labels. Best fit, longest documents first (bin packing; at most 11/9 of the fewest windows plus
/// one), so the packing depends on the lengths alone. Documents without a target among their first T + 1 tokens are left
/// out. Needs 16 bytes per document.
class WholeWindows final : public Windows {
 public:
  WholeWindows(std::shared_ptr<const TokenSource> source, std::int64_t sequence_length);
  std::int64_t count() const noexcept override {
    return static_cast<std::int64_t>(first_.size()) - 1;
  }
  void append(std::int64_t window, Batch& batch) const override;
  std::int64_t cut_documents() const noexcept { return cut_; }
  std::int64_t left_out() const noexcept { return left_out_; }

 private:
  std::int64_t used_length(std::int64_t document) const;
  bool has_target(std::int64_t document) const;
  void append_document(std::int64_t document, Batch& batch) const;

  std::shared_ptr<const TokenSource> source_;
  std::int64_t sequence_length_;
  std::vector<std::int64_t> documents_;  // window by window
  std::vector<std::int64_t> first_;      // place of each window's first document, and the end
  std::int64_t cut_ = 0, left_out_ = 0;
};

/// Windows of a source as it wants to be cut. Throws InputError when there is none.
std::unique_ptr<Windows> make_windows(std::shared_ptr<const TokenSource> source,
                                      std::optional<std::uint64_t> key,
                                      std::int64_t sequence_length);

}  // namespace moesaic::data
