#include "core/tokenizer/bpe_tokenizer.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "core/base/error.h"
#include "core/base/json_value.h"
#include "core/tokenizer/unicode.h"
#include "core/tokenizer/utf8.h"

namespace moesaic::tokenizer {
namespace {

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeParts parts) : parts_(std::move(parts)) {
    std::vector<AddedToken> raw, normalized;
    vocab_size_ = static_cast<std::int64_t>(parts_.model.tokens.size());
    for (AddedToken token : parts_.added) {
      named_.push_back({token.text, token.id, token.special});
      vocab_size_ = std::max<std::int64_t>(vocab_size_, token.id + std::int64_t{1});
      if (token.normalized && parts_.nfc) token.text = nfc(token.text);
      (token.normalized && parts_.nfc ? normalized : raw).push_back(std::move(token));
    }
    std::sort(
        named_.begin(), named_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
    for (std::size_t i = 0; i < named_.size(); ++i)
      named_by_id_.emplace(named_[i].id, i);
    raw_ = std::make_unique<AddedTokens>(std::move(raw));
    normalized_ = std::make_unique<AddedTokens>(std::move(normalized));
  }

  std::unique_ptr<Encoder> encoder(const EncodeOptions& options) const override;
  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (const auto named = named_by_id_.find(id); named != named_by_id_.end()) {
        const NamedToken& token = named_[named->second];
        if (!token.special || !skip_special) text += token.text;
        continue;
      }
      const auto& tokens = parts_.model.tokens;
      if (id < 0 || static_cast<std::size_t>(id) >= tokens.size() ||
          tokens[static_cast<std::size_t>(id)].empty())
        throw InputError(fmt::format("{}: {} is the id of no token", parts_.name, id));
      text += tokens[static_cast<std::size_t>(id)];
    }
    return text;
  }
  std::int64_t vocab_size() const noexcept override { return vocab_size_; }
  const std::vector<NamedToken>& named_tokens() const noexcept override { return named_; }
  std::optional<std::int32_t> end_of_text() const noexcept override { return parts_.end_of_text; }
  const std::string& name() const noexcept override { return parts_.name; }
  const std::string& content_hash() const noexcept override { return parts_.content_hash; }

 private:
  friend class BpeEncoder;
  BpeParts parts_;
  std::int64_t vocab_size_ = 0;
  std::vector<NamedToken> named_;
  std::unordered_map<std::int32_t, std::size_t> named_by_id_;
  std::unique_ptr<AddedTokens> raw_, normalized_;  // looked for before and after normalisation
};

class BpeEncoder final : public Encoder {
 public:
  BpeEncoder(const BpeTokenizer& tokenizer, const EncodeOptions& options)
      : tokenizer_(tokenizer),
        options_(options),
        pre_tokenizer_(tokenizer.parts_.steps),
        merger_(tokenizer.parts_.model) {}

  void encode(std::string_view text, std::vector<std::int32_t>& out) override {
    const BpeParts& parts = tokenizer_.parts_;
    if (options_.add_special) out.insert(out.end(), parts.before.begin(), parts.before.end());
    if (valid_utf8_prefix(text) == text.size()) {
      encode_valid(text, out);
    } else {
      encode_valid(replace_invalid_utf8(text, replaced_), out);
    }
    if (options_.add_special) out.insert(out.end(), parts.after.begin(), parts.after.end());
  }

 private:
  void encode_valid(std::string_view text, std::vector<std::int32_t>& out) {
    const auto token = [&](std::int32_t id) { out.push_back(id); };
    tokenizer_.raw_->split(
        text,
        options_.parse_special,
        [&](std::size_t begin, std::size_t end) {
          normalize(text.substr(begin, end - begin), out);
        },
        token);
  }
  void normalize(std::string_view text, std::vector<std::int32_t>& out) {
    if (!tokenizer_.parts_.nfc || is_ascii(text)) return words(text, out);
    words(nfc(text), out);
  }
  void words(std::string_view text, std::vector<std::int32_t>& out) {
    const std::function<void(std::string_view)> word = [&](std::string_view piece) {
      merger_.encode(piece, out);
    };
    if (tokenizer_.normalized_->empty()) return pre_tokenizer_.split(text, word);
    tokenizer_.normalized_->split(
        text,
        options_.parse_special,
        [&](std::size_t begin, std::size_t end) {
          pre_tokenizer_.split(text.substr(begin, end - begin), word);
        },
        [&](std::int32_t id) { out.push_back(id); });
  }

  const BpeTokenizer& tokenizer_;
  EncodeOptions options_;
  PreTokenizer pre_tokenizer_;
  BpeMerger merger_;
};

std::unique_ptr<Encoder> BpeTokenizer::encoder(const EncodeOptions& options) const {
  return std::make_unique<BpeEncoder>(*this, options);
}

// How the families call the end of a document.
constexpr std::array<std::string_view, 7> kEndNames{"<|endoftext|>",
                                                    "<|end_of_text|>",
                                                    "<｜end▁of▁sentence｜>",
                                                    "[EOS]",
                                                    "<|eos|>",
                                                    "<eos>",
                                                    "</s>"};

const AddedToken* find_text(const std::vector<AddedToken>& added, std::string_view text) {
  for (const AddedToken& token : added) {
    if (token.text == text) return &token;
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<const Tokenizer> make_bpe_tokenizer(BpeParts parts) {
  return std::make_shared<BpeTokenizer>(std::move(parts));
}

std::string short_name(const std::string& file) {
  const auto name = file.rfind('/');
  if (name == std::string::npos || name == 0) return file;
  const auto folder = file.rfind('/', name - 1);
  return folder == std::string::npos ? file : file.substr(folder + 1);
}

void require_few_gaps(std::int64_t largest, std::size_t tokens, const std::string& where) {
  constexpr std::int64_t kFree = std::int64_t{1} << 16;
  const auto count = static_cast<std::int64_t>(tokens);
  if (largest < 2 * count + kFree) return;
  throw InputError(fmt::format(
      "{}: the largest id is {}, but there are {} tokens; at most {} ids may be free between them",
      where,
      largest,
      count,
      count + kFree));
}

std::string content_hash_of(std::string_view bytes) {
  return fmt::format("crc32c:{:08x}:{}", crc32c(bytes.data(), bytes.size()), bytes.size());
}

std::string config_name(const std::string& file) {
  const auto slash = file.rfind('/');
  return (slash == std::string::npos ? "" : file.substr(0, slash + 1)) + "tokenizer_config.json";
}

std::optional<std::int32_t> find_end_of_text(const std::vector<AddedToken>& added,
                                             std::string_view config,
                                             const std::string& file) {
  if (!config.empty()) {
    const JsonValue root = parse_json(config, config_name(file));
    const JsonNode eos = JsonNode(root, config_name(file)).member_or_null("eos_token");
    if (!eos.is_null()) {
      const JsonNode text =
          eos.value().kind == JsonValue::Kind::object ? eos.member("content") : eos;
      const AddedToken* token = find_text(added, text.text());
      if (token == nullptr)
        text.fail(fmt::format("\"{}\" is not among the added tokens of {}", text.text(), file));
      return token->id;
    }
  }
  const AddedToken* found = nullptr;
  for (const std::string_view name : kEndNames) {
    const AddedToken* token = find_text(added, name);
    if (token != nullptr && found != nullptr) return {};  // two candidates: not ours to choose
    if (token != nullptr) found = token;
  }
  if (found == nullptr) return {};
  return found->id;
}

}  // namespace moesaic::tokenizer
