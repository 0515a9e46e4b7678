#include <fmt/format.h>

#include "core/base/error.h"
#include "core/tokenizer/tokenizer.h"

namespace moesaic::tokenizer {
namespace {

constexpr std::int32_t kEnd = 0;  // data::kEndOfText: text holds no zero bytes

class ByteEncoder final : public Encoder {
 public:
  void encode(std::string_view text, std::vector<std::int32_t>& out) override {
    if (const auto zero = text.find('\0'); zero != std::string_view::npos)
      throw InputError(fmt::format(
          "a zero byte at offset {} of the text; byte-level text must not hold any (it is the "
          "end-of-text token)",
          zero));
    out.reserve(out.size() + text.size());
    for (const char c : text)
      out.push_back(static_cast<unsigned char>(c));
  }
};

class ByteTokenizer final : public Tokenizer {
 public:
  std::unique_ptr<Encoder> encoder(const EncodeOptions&) const override {
    return std::make_unique<ByteEncoder>();
  }
  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id < 0 || id > 255) throw InputError(fmt::format("bytes: {} is the id of no token", id));
      if (id != kEnd || !skip_special) text.push_back(static_cast<char>(id));
    }
    return text;
  }
  std::int64_t vocab_size() const noexcept override { return 256; }
  const std::vector<NamedToken>& named_tokens() const noexcept override { return named_; }
  std::optional<std::int32_t> end_of_text() const noexcept override { return kEnd; }
  const std::string& name() const noexcept override { return name_; }
  const std::string& content_hash() const noexcept override { return name_; }

 private:
  std::vector<NamedToken> named_;
  std::string name_ = "bytes";
};

}  // namespace

std::shared_ptr<const Tokenizer> byte_tokenizer() {
  return std::make_shared<ByteTokenizer>();
}

}  // namespace moesaic::tokenizer
