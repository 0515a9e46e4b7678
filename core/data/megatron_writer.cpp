#include "core/data/megatron_writer.h"

#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBuffer = std::size_t{1} << 20;

fs::path with(const fs::path& prefix, const char* extension) {
  return fs::path(prefix.string() + extension);
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove(path, ignored);
}

// A durable file written in large pieces.
class BufferedFile {
 public:
  explicit BufferedFile(const fs::path& path) : file_(path, DurableFile::Mode::replace) {
    buffer_.reserve(kBuffer);
  }
  template <class T>
  void put(T value) {
    if (buffer_.size() + sizeof(T) > kBuffer) flush();
    const auto* bytes = reinterpret_cast<const char*>(&value);
    buffer_.insert(buffer_.end(), bytes, bytes + sizeof(T));
  }
  void put_bytes(const char* bytes, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      put(bytes[i]);
  }
  void flush() {
    file_.write(buffer_.data(), buffer_.size());
    buffer_.clear();
  }
  void finish() {
    flush();
    file_.finish();
  }
  std::uint64_t bytes() const noexcept { return file_.bytes() + buffer_.size(); }
  std::uint32_t crc() const noexcept { return file_.crc(); }  // of what was flushed

 private:
  DurableFile file_;
  std::vector<char> buffer_;
};

void rename_file(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error)
    throw ResourceError(fmt::format("{}: rename failed: {}", to.string(), error.message()));
}

}  // namespace

TokenType megatron_type(std::int64_t vocab_size) noexcept {
  return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

struct MegatronWriter::Impl {
  Impl(fs::path path, Options o)
      : prefix(std::move(path)),
        options(std::move(o)),
        type(megatron_type(options.vocab_size)),
        bin(with(prefix, ".bin.tmp")),
        lengths(with(prefix, ".lengths.tmp")) {}
  ~Impl() {
    for (const char* extension : {".bin.tmp", ".idx.tmp", ".meta.json.tmp", ".lengths.tmp"})
      remove_quietly(with(prefix, extension));
  }
  void write_index(BufferedFile& idx) const;
  TokenMeta meta(const BufferedFile& idx) const;

  fs::path prefix;
  Options options;
  TokenType type;
  BufferedFile bin, lengths;  // the lengths wait on the disk until their number is known
  std::int64_t open_length = 0, documents = 0, tokens = 0;
};

MegatronWriter::MegatronWriter(fs::path prefix, Options options) {
  MOESAIC_CHECK(1 <= options.vocab_size && options.vocab_size <= INT32_MAX, "no such vocabulary");
  for (const char* extension : {".bin", ".idx"}) {
    if (!options.overwrite && fs::exists(with(prefix, extension))) {
      throw UsageError(fmt::format("{} already exists; choose another name, or say --overwrite",
                                   with(prefix, extension).string()));
    }
  }
  create_folder(prefix.parent_path());
  impl_ = std::make_unique<Impl>(std::move(prefix), std::move(options));
}
MegatronWriter::~MegatronWriter() = default;

std::int64_t MegatronWriter::num_documents() const noexcept {
  return impl_->documents;
}
std::int64_t MegatronWriter::num_tokens() const noexcept {
  return impl_->tokens;
}

void MegatronWriter::append(std::span<const std::int32_t> tokens) {
  for (const std::int32_t token : tokens) {
    MOESAIC_CHECK(0 <= token && token < impl_->options.vocab_size,
                  "a token outside the vocabulary");
    if (impl_->type == TokenType::u16)
      impl_->bin.put(static_cast<std::uint16_t>(token));
    else
      impl_->bin.put(token);
  }
  impl_->open_length += static_cast<std::int64_t>(tokens.size());
}

void MegatronWriter::end_document() {
  if (impl_->open_length > INT32_MAX) {
    throw InputError(fmt::format(
        "{}: document {} has {} tokens; a Megatron index holds at most {} per document; split it",
        impl_->prefix.string(),
        impl_->documents,
        impl_->open_length,
        INT32_MAX));
  }
  impl_->lengths.put(static_cast<std::int32_t>(impl_->open_length));
  impl_->tokens += std::exchange(impl_->open_length, 0);
  ++impl_->documents;
}

void MegatronWriter::Impl::write_index(BufferedFile& idx) const {
  const MappedFile mapped(with(prefix, ".lengths.tmp"), MappedFile::Links::refuse);
  const auto length = [&](std::int64_t document) {
    std::int32_t value;
    std::memcpy(&value, mapped.data() + static_cast<std::size_t>(document) * 4, 4);
    return value;
  };
  idx.put_bytes("MMIDIDX\0\0", 9);
  idx.put(std::uint64_t{1});
  idx.put(static_cast<std::uint8_t>(type == TokenType::u16 ? 8 : 4));
  idx.put(static_cast<std::uint64_t>(documents));
  idx.put(static_cast<std::uint64_t>(documents) + 1);
  for (std::int64_t d = 0; d < documents; ++d)
    idx.put(length(d));
  std::int64_t offset = 0;
  for (std::int64_t d = 0; d < documents; ++d) {
    idx.put(offset);
    offset += static_cast<std::int64_t>(length(d)) * static_cast<std::int64_t>(byte_size(type));
  }
  for (std::int64_t d = 0; d <= documents; ++d)
    idx.put(d);
}

TokenMeta MegatronWriter::Impl::meta(const BufferedFile& idx) const {
  TokenMeta m;
  m.tokenizer = options.tokenizer;
  m.tokenizer_hash = options.tokenizer_hash;
  m.vocab_size = options.vocab_size;
  m.end_of_text = options.end_of_text;
  m.documents = documents;
  m.tokens = tokens;
  m.bin_bytes = bin.bytes();
  m.idx_bytes = idx.bytes();
  m.bin_crc32c = bin.crc();
  m.idx_crc32c = idx.crc();
  return m;
}

TokenMeta MegatronWriter::finish() {
  MOESAIC_CHECK(impl_->open_length == 0, "the last document was not closed");
  if (impl_->tokens == 0) {
    throw InputError(fmt::format("{}: nothing to write: {} documents and no token",
                                 impl_->prefix.string(),
                                 impl_->documents));
  }
  const fs::path& prefix = impl_->prefix;
  impl_->bin.finish();
  impl_->lengths.finish();
  BufferedFile idx(with(prefix, ".idx.tmp"));
  impl_->write_index(idx);
  idx.finish();
  const TokenMeta meta = impl_->meta(idx);
  DurableFile side(with(prefix, ".meta.json.tmp"), DurableFile::Mode::replace);
  side.write(to_json(meta));
  side.finish();
  // An old index must never stand beside new data.
  if (impl_->options.overwrite) remove_quietly(with(prefix, ".idx"));
  for (const char* extension : {".bin", ".meta.json", ".idx"})
    rename_file(with(prefix, (std::string(extension) + ".tmp").c_str()), with(prefix, extension));
  sync_folder(prefix.parent_path());
  return meta;
}

}  // namespace moesaic::data
