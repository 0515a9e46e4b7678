#include "core/data/joined_source.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::data {
namespace {

class JoinedSource : public TokenSource {
 public:
  explicit JoinedSource(std::vector<std::shared_ptr<const TokenSource>> sources)
      : sources_(std::move(sources)) {
    first_document_.push_back(0);
    for (const auto& s : sources_) {
      first_document_.push_back(first_document_.back() + s->num_documents());
      name_ += (name_.empty() ? "" : ", ") + s->name();
    }
  }
  std::int64_t num_documents() const noexcept override { return first_document_.back(); }
  std::int64_t document_length(std::int64_t document) const override {
    const auto [source, inside] = locate(document);
    return sources_[source]->document_length(inside);
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    const auto [source, inside] = locate(document);
    sources_[source]->read(inside, begin, out);
  }
  void read_targets(std::int64_t document, std::int64_t begin, std::span<char> out) const override {
    const auto [source, inside] = locate(document);
    sources_[source]->read_targets(inside, begin, out);
  }
  bool keeps_documents_whole() const noexcept override {
    return sources_[0]->keeps_documents_whole();
  }
  const std::string& name() const noexcept override { return name_; }
  std::int64_t num_tokens() const override {
    std::int64_t sum = 0;
    for (const auto& source : sources_)
      sum += source->num_tokens();
    return sum;
  }
  SourceInfo info() const override {
    SourceInfo joined = sources_[0]->info();
    joined.meta.reset();
    for (std::size_t i = 1; i < sources_.size(); ++i) {
      const SourceInfo next = sources_[i]->info();
      joined.bytes += next.bytes;
      if (next.format != joined.format) joined.format = config::DataFormat::automatic;
      if (next.type != joined.type) joined.type = "";
      if (next.end_of_text != joined.end_of_text) joined.end_of_text.reset();
    }
    return joined;
  }
  void check_ids() const override {
    for (const auto& source : sources_)
      source->check_ids();
  }

 private:
  std::pair<std::size_t, std::int64_t> locate(std::int64_t document) const {
    const auto it = std::upper_bound(first_document_.begin(), first_document_.end(), document) - 1;
    return {static_cast<std::size_t>(it - first_document_.begin()), document - *it};
  }
  std::vector<std::shared_ptr<const TokenSource>> sources_;
  std::vector<std::int64_t> first_document_;  // prefix sums
  std::string name_;
};

}  // namespace

std::shared_ptr<const TokenSource> join_sources(
    std::vector<std::shared_ptr<const TokenSource>> sources) {
  MOESAIC_CHECK(!sources.empty(), "at least one source");
  if (sources.size() == 1) return sources[0];
  for (const auto& source : sources) {
    if (source->keeps_documents_whole() == sources[0]->keeps_documents_whole()) continue;
    throw UsageError(
        fmt::format("{} and {} cannot be one data set: conversations are packed whole, other "
                    "documents are cut; "
                    "give them weights in data.train: {{path: …, weight: …}}",
                    sources[0]->name(),
                    source->name()));
  }
  return std::make_shared<JoinedSource>(std::move(sources));
}

}  // namespace moesaic::data
