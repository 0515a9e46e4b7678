#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moesaic::tokenizer {

struct EncodeOptions {
  /// Text that spells a special token (say "<|endoftext|>") becomes that token. False: it is ordinary text; added
  /// tokens that are not special are found all the same.
  bool parse_special = true;
  /// What the file's post-processor adds around a text (as a rule a begin-of-text token). Off, as pre-training wants it.
  bool add_special = false;
};

/// Turns text into token ids; holds the working memory of one thread. Must not outlive its Tokenizer.
class Encoder {
 public:
  virtual ~Encoder() = default;
  /// Appends the ids of `text` (any bytes) to `out`. Invalid UTF-8 (byte-level BPE only): every maximal part of a
  /// sequence that is cut short, and every other byte that cannot stand where it stands, counts as one U+FFFD, as
  /// Python's bytes.decode(errors="replace") has it. Throws InputError where a pattern gives up on a text.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& out) = 0;
  /// How many U+FFFD took the place of invalid bytes so far.
  std::int64_t replaced() const noexcept { return replaced_; }

 protected:
  std::int64_t replaced_ = 0;
};

/// A token with a text of its own, found before anything else is looked at.
struct NamedToken {
  std::string text;
  std::int32_t id = 0;
  bool special = false;
};

/// Text to token ids and back. Immutable, so usable from several threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::unique_ptr<Encoder> encoder(const EncodeOptions& options = {}) const = 0;
  /// The bytes of the tokens, one after the other; may end in the middle of a character. `skip_special` leaves special
  /// tokens out. Throws InputError for an id that is no token.
  virtual std::string decode(std::span<const std::int32_t> ids,
                             bool skip_special = false) const = 0;
  /// Largest id + 1.
  virtual std::int64_t vocab_size() const noexcept = 0;
  /// Special and other added tokens by id.
  virtual const std::vector<NamedToken>& named_tokens() const noexcept = 0;
  /// The token that closes a document, where the files say which (docs/tokenizers.md).
  virtual std::optional<std::int32_t> end_of_text() const noexcept = 0;
  /// "bytes", or the file and its folder: "DeepSeek-V3/tokenizer.json".
  virtual const std::string& name() const noexcept = 0;
  /// Of all bytes that decide what the tokenizer does: CRC-32C and count, "crc32c:0123abcd:7847602"; "bytes".
  virtual const std::string& content_hash() const noexcept = 0;

  std::vector<std::int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// The id of a named token.
  std::optional<std::int32_t> find(std::string_view text) const;
};

/// Token id = byte. Byte 0 is end-of-text: text must not hold it.
std::shared_ptr<const Tokenizer> byte_tokenizer();

/// Parses a Hugging Face tokenizer.json of a byte-level BPE. `config` is the text of the tokenizer_config.json beside it
/// (only its eos_token is read), or empty. Throws InputError naming `file` and the JSON path of the first thing that is
/// wrong, or that is not implemented.
std::shared_ptr<const Tokenizer> parse_tokenizer_json(std::string_view json,
                                                      std::string_view config,
                                                      const std::string& file);

/// Parses a tiktoken rank file (lines of base64 and rank). `config` is the text of the tokenizer_config.json beside it:
/// added_tokens_decoder, eos_token, and pat_str, which may be missing where tokenizer_class is TikTokenTokenizer (Kimi).
/// Throws InputError naming file:line, or the JSON path in `config`.
std::shared_ptr<const Tokenizer> parse_rank_file(std::string_view ranks,
                                                 std::string_view config,
                                                 const std::string& file);

/// "bytes", a tokenizer.json, a rank file (*.model, *.tiktoken), or a folder that holds one of them. Throws InputError;
/// UsageError in a build without PCRE2 and utf8proc for anything but "bytes".
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& spec);

/// A file that open_tokenizer() reads, and the name under which it is found in a folder of its own.
struct TokenizerFile {
  std::filesystem::path path;
  std::string name;
};
/// The files that open_tokenizer(spec) reads; none for "bytes".
std::vector<TokenizerFile> tokenizer_files(const std::string& spec);

/// Text of a stream of tokens: characters come out once they are complete, invalid bytes and ids without a token as U+FFFD.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string push(std::int32_t id);
  /// What is left of an incomplete character.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

}  // namespace moesaic::tokenizer
