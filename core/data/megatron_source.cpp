#include "core/data/megatron_source.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/data/foreign_file.h"
#include "core/data/mapped_tokens.h"
#include "core/data/megatron_index.h"
#include "core/data/token_files.h"

namespace moesaic::data {
namespace {

class MegatronSource final : public TokenSource {
 public:
  MegatronSource(const PairNames& names, std::int64_t vocab_size)
      : names_(names),
        idx_(names.idx, MappedFile::Links::follow),
        tokens_(names.bin, vocab_size),
        index_({idx_.data(), idx_.size()}, tokens_.bytes().size(), names.idx, names.bin) {
    tokens_.set_range(0, index_.num_tokens(), index_.type());
    tokens_.set_document_lookup([this](std::int64_t token) { return document_of(token); });
    if (std::filesystem::exists(names.meta)) {
      const MappedFile file(names.meta, MappedFile::Links::follow);
      meta_ = parse_token_meta(file.text(), names.meta);
      check_meta();
    }
    if (tokens_.bytes().size() <= FileOptions::kScannedBytes) tokens_.check_all();
  }
  std::int64_t num_documents() const noexcept override { return index_.num_documents(); }
  std::int64_t document_length(std::int64_t document) const override {
    return index_.document_length(document);
  }
  void read(std::int64_t document, std::int64_t begin, std::span<std::int32_t> out) const override {
    MOESAIC_CHECK(
        0 <= begin && begin + static_cast<std::int64_t>(out.size()) <= document_length(document),
        "tokens outside the document");
    tokens_.read(index_.document_begin(document) + begin, out);
  }
  const std::string& name() const noexcept override { return names_.prefix; }
  std::int64_t num_tokens() const override { return index_.num_tokens(); }
  SourceInfo info() const override {
    return {.format = config::DataFormat::megatron,
            .type = data::name(index_.type()),
            .bytes = tokens_.bytes().size() + idx_.size(),
            .end_of_text = meta_ ? meta_->end_of_text : std::nullopt,
            .meta = meta_};
  }
  void check_ids() const override { tokens_.check_all(); }

 private:
  std::int64_t document_of(std::int64_t token) const {
    std::int64_t low = 0,
                 high = num_documents();  // document_begin(low) <= token < document_begin(high)
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (index_.document_begin(middle) <= token ? low : high) = middle;
    }
    return low;
  }
  void check_meta() const {
    if (meta_->tokens != index_.num_tokens() || meta_->documents != index_.num_documents()) {
      throw InputError(
          fmt::format("{}: describes {} documents and {} tokens, but {} holds {} and {}; the files "
                      "do not belong "
                      "together: remove this one, or write the data anew",
                      names_.meta,
                      meta_->documents,
                      meta_->tokens,
                      names_.idx,
                      index_.num_documents(),
                      index_.num_tokens()));
    }
    if (meta_->vocab_size > tokens_.vocab_size()) {
      throw InputError(fmt::format(
          "{}: the data was made with a vocabulary of {} ids{}, but model.vocab_size is {}",
          names_.meta,
          meta_->vocab_size,
          meta_->tokenizer.empty() ? "" : " (tokenizer " + meta_->tokenizer + ")",
          tokens_.vocab_size()));
    }
  }

  PairNames names_;
  MappedFile idx_;
  MappedTokens tokens_;
  MegatronIndex index_;
  std::optional<TokenMeta> meta_;
};

}  // namespace

std::unique_ptr<TokenSource> open_megatron(const std::string& path, std::int64_t vocab_size) {
  const PairNames names = pair_names(path);
  if (std::filesystem::exists(names.idx)) {
    // What is no index is told as that, also where its .bin is missing.
    const MappedFile idx(names.idx, MappedFile::Links::follow);
    MegatronIndex::require_magic({idx.data(), idx.size()}, names.idx);
  }
  for (const auto& [missing, present, hint] :
       {std::tuple{names.idx, names.bin, "is this a raw file? then set data.format: nanogpt"},
        std::tuple{names.bin, names.idx, "copy both"}}) {
    if (!std::filesystem::exists(missing) && std::filesystem::exists(present)) {
      throw InputError(
          fmt::format("{}: cannot open: No such file; a Megatron pair is {} and this file; {}",
                      missing,
                      present,
                      hint));
    }
  }
  return std::make_unique<MegatronSource>(names, vocab_size);
}

}  // namespace moesaic::data
