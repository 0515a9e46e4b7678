#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/windows.h"

namespace moesaic::data {

WholeWindows::WholeWindows(std::shared_ptr<const TokenSource> source, std::int64_t sequence_length)
    : source_(std::move(source)), sequence_length_(sequence_length) {
  MOESAIC_CHECK(sequence_length >= 1, "sequence length below 1");
  std::vector<std::int64_t> order;
  for (std::int64_t d = 0; d < source_->num_documents(); ++d) {
    if (has_target(d))
      order.push_back(d);
    else
      ++left_out_;
    cut_ += source_->document_length(d) > sequence_length ? 1 : 0;
  }
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return used_length(a) > used_length(b);
  });
  std::multimap<std::int64_t, std::size_t> room;  // tokens left -> window
  std::vector<std::size_t> window(order.size());
  std::size_t windows = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t length = used_length(order[i]);
    auto fit = room.lower_bound(length);
    const bool is_new = fit == room.end();
    window[i] = is_new ? windows++ : fit->second;
    const std::int64_t left = (is_new ? sequence_length_ : fit->first) - length;
    if (!is_new) room.erase(fit);
    if (left > 0) room.emplace(left, window[i]);
  }
  first_.assign(windows + 1, 0);
  for (const std::size_t w : window)
    ++first_[w + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<std::int64_t> next(first_.begin(), first_.end() - 1);
  documents_.resize(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    documents_[static_cast<std::size_t>(next[window[i]]++)] = order[i];
}

std::int64_t WholeWindows::used_length(std::int64_t document) const {
  return std::min(source_->document_length(document), sequence_length_);
}

bool WholeWindows::has_target(std::int64_t document) const {
  const std::int64_t length = std::min(source_->document_length(document), sequence_length_ + 1);
  if (length < 2) return false;
  std::vector<char> target(static_cast<std::size_t>(length) - 1);
  source_->read_targets(document, 1, target);
  return std::any_of(target.begin(), target.end(), [](char t) { return t != 0; });
}

void WholeWindows::append_document(std::int64_t document, Batch& batch) const {
  const auto length = static_cast<std::size_t>(used_length(document));
  const auto known = static_cast<std::size_t>(
      std::min(source_->document_length(document), sequence_length_ + 1));  // with the last label
  std::vector<std::int32_t> text(known);
  std::vector<char> target(known);
  source_->read(document, 0, text);
  source_->read_targets(document, 0, target);
  for (std::size_t t = 0; t < length; ++t) {
    const bool has_label = t + 1 < known && target[t + 1] != 0;
    batch.tokens.push_back(text[t]);
    batch.labels.push_back(has_label ? text[t + 1] : kIgnoredLabel);
    batch.positions.push_back(static_cast<std::int32_t>(t));
    batch.valid_labels += has_label ? 1 : 0;
  }
  batch.cu.push_back(static_cast<std::int32_t>(batch.tokens.size()));
}

void WholeWindows::append(std::int64_t window, Batch& batch) const {
  const auto w = static_cast<std::size_t>(window);
  const std::size_t end = batch.tokens.size() + static_cast<std::size_t>(sequence_length_);
  for (std::int64_t i = first_[w]; i < first_[w + 1]; ++i)
    append_document(documents_[static_cast<std::size_t>(i)], batch);
  append_filler(batch, static_cast<std::int64_t>(end - batch.tokens.size()));
  ++batch.num_samples;
}

std::unique_ptr<Windows> make_windows(std::shared_ptr<const TokenSource> source,
                                      std::optional<std::uint64_t> key,
                                      std::int64_t sequence_length) {
  const std::string name = source->name();
  const std::int64_t documents = source->num_documents(), tokens = source->num_tokens();
  std::unique_ptr<Windows> windows;
  const bool is_whole = source->keeps_documents_whole();
  if (is_whole)
    windows = std::make_unique<WholeWindows>(std::move(source), sequence_length);
  else
    windows = std::make_unique<CutWindows>(std::move(source), key, sequence_length);
  if (windows->count() < 1 && is_whole) {
    throw InputError(
        fmt::format("{}: none of {} records has a target of the loss within data.sequence_length = "
                    "{} tokens; use "
                    "longer sequences",
                    name,
                    documents,
                    sequence_length));
  }
  if (windows->count() < 1) {
    throw InputError(
        fmt::format("{}: {} tokens in {} documents, fewer than one window of "
                    "data.sequence_length + 1 = {}; use more text or shorter sequences",
                    name,
                    tokens,
                    documents,
                    sequence_length + 1));
  }
  return windows;
}

}  // namespace moesaic::data
