#include "core/checkpoint/data_files.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/base/split_float.h"
#include "core/checkpoint/safetensors_header.h"

namespace moesaic {
namespace {

struct Kind {
  const char* prefix;
  const char* stem;
};
constexpr std::array<Kind, 4> kKinds{
    {{"", "model"}, {"optimizer/", "optimizer"}, {"ema/", "ema"}, {"buffer/", "buffers"}}};

std::size_t kind_of(const std::string& name) {
  for (std::size_t i = 1; i < kKinds.size(); ++i) {
    if (name.starts_with(kKinds[i].prefix)) return i;
  }
  return 0;
}

void cut_kind(const std::vector<const StateTensor*>& tensors,
              const std::string& stem,
              std::uint64_t max_bytes,
              std::vector<PlannedFile>& files) {
  std::vector<PlannedFile> parts;
  std::uint64_t used = 0;
  for (const auto* t : tensors) {
    if (parts.empty() || used + t->bytes() > max_bytes) {
      parts.emplace_back();
      used = 0;
    }
    parts.back().tensors.push_back(t);
    used += t->bytes();
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name = parts.size() == 1
                        ? stem + ".safetensors"
                        : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, parts.size());
    std::stable_sort(
        parts[i].tensors.begin(), parts[i].tensors.end(), [](const auto* a, const auto* b) {
          return byte_size(a->dtype()) > byte_size(b->dtype());
        });
    files.push_back(std::move(parts[i]));
  }
}

constexpr std::size_t kPieceUnit = 8;

void check_split(const StateTensor& t) {
  check_dtype(t.view, DType::bf16, t.name.c_str());
  check_dtype(t.remainder, DType::u16, t.name.c_str());
  check_shape(t.remainder, t.view.shape(), t.name.c_str());
}

TensorView as_bytes(std::byte* data, std::size_t bytes, Device device) {
  return {data, DType::u8, Shape{static_cast<std::int64_t>(bytes)}, device};
}

void write_piece(DurableFile& out,
                 const std::string& tensor,
                 const std::byte* data,
                 std::size_t bytes) {
  try {
    out.write(data, bytes);
  } catch (const ResourceError& e) {
    throw ResourceError(fmt::format("{} (in tensor '{}')", e.what(), tensor));
  }
}

}  // namespace

std::vector<PlannedFile> plan_files(std::span<const StateTensor> tensors,
                                    std::uint64_t max_bytes,
                                    const std::string& writer) {
  std::array<std::vector<const StateTensor*>, kKinds.size()> by_kind;
  for (const auto& t : tensors)
    by_kind[kind_of(t.name)].push_back(&t);
  std::vector<PlannedFile> files;
  for (std::size_t i = 0; i < kKinds.size(); ++i)
    cut_kind(by_kind[i],
             writer.empty() ? kKinds[i].stem : fmt::format("{}-{}", kKinds[i].stem, writer),
             max_bytes,
             files);
  return files;
}

// A piece of a split tensor takes 4 bytes of the buffer per number for what files hold, and another 4 for its two parts.
Staging::Staging(Stream& stream, std::size_t bytes)
    : stream_(stream),
      buffer_((std::max<std::size_t>(bytes, 1) + kPieceUnit - 1) / kPieceUnit * kPieceUnit,
              stream.device(),
              "checkpoint staging",
              stream.device().kind == Device::Kind::cuda ? MemoryKind::pinned_host
                                                         : MemoryKind::pageable_host) {
  MOESAIC_CHECK(stream.mode() != Stream::Mode::dry, "a dry stream copies nothing");
}

void Staging::download(const ConstTensorView& from,
                       std::size_t at,
                       std::byte* to,
                       std::size_t bytes) {
  const ConstTensorView piece(
      from.data() + at, DType::u8, Shape{static_cast<std::int64_t>(bytes)}, from.device());
  copy_tensor(as_bytes(to, bytes, kCpu), piece, stream_);
}

void Staging::upload(const TensorView& to,
                     std::size_t at,
                     const std::byte* from,
                     std::size_t bytes) {
  const ConstTensorView piece(from, DType::u8, Shape{static_cast<std::int64_t>(bytes)});
  copy_tensor(as_bytes(to.data() + at, bytes, to.device()), piece, stream_);
}

void Staging::read(const StateTensor& from, const StateAccess::Sink& sink) {
  if (from.access) return from.access->read(sink, stream_);
  if (!from.remainder.empty()) return read_split(from, sink);
  for (std::size_t at = 0; at < from.view.bytes(); at += buffer_.bytes()) {
    const std::size_t n = std::min(buffer_.bytes(), from.view.bytes() - at);
    download(from.view, at, buffer_.data(), n);
    stream_.synchronize();
    sink(buffer_.data(), n);
  }
}

void Staging::write(const StateTensor& to, const std::byte* from) {
  if (to.access) return to.access->write(from, stream_);
  if (!to.remainder.empty()) return write_split(to, from);
  for (std::size_t at = 0; at < to.view.bytes(); at += buffer_.bytes()) {
    const std::size_t n = std::min(buffer_.bytes(), to.view.bytes() - at);
    std::copy_n(from + at, n, buffer_.data());
    upload(to.view, at, buffer_.data(), n);
    stream_.synchronize();
  }
}

void Staging::read_split(const StateTensor& from, const StateAccess::Sink& sink) {
  check_split(from);
  const auto total = static_cast<std::size_t>(from.view.numel()),
             most = buffer_.bytes() / kPieceUnit;
  auto* joined = reinterpret_cast<float*>(buffer_.data());
  auto* weights = reinterpret_cast<bf16*>(joined + most);
  auto* remainders = reinterpret_cast<std::uint16_t*>(weights + most);
  for (std::size_t at = 0; at < total; at += most) {
    const std::size_t n = std::min(most, total - at);
    download(from.view, at * 2, reinterpret_cast<std::byte*>(weights), n * 2);
    download(from.remainder, at * 2, reinterpret_cast<std::byte*>(remainders), n * 2);
    stream_.synchronize();
    for (std::size_t i = 0; i < n; ++i)
      joined[i] = join_float(weights[i], remainders[i]);
    sink(buffer_.data(), n * sizeof(float));
  }
}

void Staging::write_split(const StateTensor& to, const std::byte* from) {
  check_split(to);
  const auto total = static_cast<std::size_t>(to.view.numel()), most = buffer_.bytes() / kPieceUnit;
  auto* weights = reinterpret_cast<bf16*>(buffer_.data());
  auto* remainders = reinterpret_cast<std::uint16_t*>(weights + most);
  for (std::size_t at = 0; at < total; at += most) {
    const std::size_t n = std::min(most, total - at);
    for (std::size_t i = 0; i < n; ++i) {
      float value = 0;  // files align nothing
      std::memcpy(&value, from + (at + i) * sizeof(float), sizeof(float));
      split_float(value, weights[i], remainders[i]);
    }
    upload(to.view, at * 2, reinterpret_cast<std::byte*>(weights), n * 2);
    upload(to.remainder, at * 2, reinterpret_cast<std::byte*>(remainders), n * 2);
    stream_.synchronize();
  }
}

std::vector<std::byte> bytes_of_state(const StateTensor& tensor, Stream& stream) {
  std::vector<std::byte> bytes;
  bytes.reserve(tensor.bytes());
  Staging(stream, std::min(tensor.bytes(), kStagingBytes))
      .read(tensor, [&](const std::byte* data, std::size_t n) {
        bytes.insert(bytes.end(), data, data + n);
      });
  return bytes;
}

void fill_state(const StateTensor& tensor, const std::byte* bytes, Stream& stream) {
  Staging(stream, std::min(tensor.bytes(), kStagingBytes)).write(tensor, bytes);
}

std::string stored_name(const StateTensor& t) {
  return t.place ? t.name + to_string(Box{t.place->begin, t.shape()}) : t.name;
}

void write_data_file(const std::filesystem::path& folder,
                     const PlannedFile& file,
                     Staging& staging,
                     Manifest& manifest,
                     const ByteProgress& progress) {
  const auto path = folder / file.name;
  std::vector<StoredTensor> entries;
  for (const auto* t : file.tensors)
    entries.push_back({stored_name(*t), t->dtype(), t->shape()});
  safetensors::place(entries);
  // Readers of published checkpoints expect the entry "format".
  const std::string header = safetensors::header_text(entries, {{"format", "pt"}}, path.string());
  DurableFile out(path, DurableFile::Mode::create);
  out.write(header);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& e = entries[i];
    std::uint32_t crc = 0;
    std::uint64_t written = 0;
    staging.read(*file.tensors[i], [&](const std::byte* data, std::size_t bytes) {
      crc = crc32c(data, bytes, crc);
      write_piece(out, e.name, data, bytes);
      progress.add(bytes);
      written += bytes;
    });
    MOESAIC_CHECK(written == e.bytes,
                  "tensor '" + e.name + "' came with another size than planned");
    manifest.tensors.push_back({file.tensors[i]->name,
                                e.dtype,
                                e.shape,
                                manifest.files.size(),
                                header.size() + e.offset,
                                e.bytes,
                                crc,
                                file.tensors[i]->place});
  }
  out.finish();
  manifest.files.push_back({file.name, out.bytes(), out.crc()});
}

}  // namespace moesaic
