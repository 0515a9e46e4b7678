#include "core/checkpoint/data_files.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "core/checkpoint/durable_file.h"
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
    if (parts.empty() || used + t->view.bytes() > max_bytes) {
      parts.emplace_back();
      used = 0;
    }
    parts.back().tensors.push_back(t);
    used += t->view.bytes();
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name = parts.size() == 1
                        ? stem + ".safetensors"
                        : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, parts.size());
    std::stable_sort(
        parts[i].tensors.begin(), parts[i].tensors.end(), [](const auto* a, const auto* b) {
          return byte_size(a->view.dtype()) > byte_size(b->view.dtype());
        });
    files.push_back(std::move(parts[i]));
  }
}

TensorView as_bytes(std::byte* data, std::size_t bytes, Device device) {
  return {data, DType::u8, Shape{static_cast<std::int64_t>(bytes)}, device};
}

}  // namespace

std::vector<PlannedFile> plan_files(std::span<const StateTensor> tensors, std::uint64_t max_bytes) {
  std::array<std::vector<const StateTensor*>, kKinds.size()> by_kind;
  for (const auto& t : tensors)
    by_kind[kind_of(t.name)].push_back(&t);
  std::vector<PlannedFile> files;
  for (std::size_t i = 0; i < kKinds.size(); ++i)
    cut_kind(by_kind[i], kKinds[i].stem, max_bytes, files);
  return files;
}

Staging::Staging(Stream& stream, std::size_t bytes)
    : stream_(stream),
      buffer_(std::max<std::size_t>(bytes, 1),
              stream.device(),
              "checkpoint staging",
              stream.device().kind == Device::Kind::cuda ? MemoryKind::pinned_host
                                                         : MemoryKind::pageable_host) {
  MOESAIC_CHECK(stream.mode() != Stream::Mode::dry, "a dry stream copies nothing");
}

void Staging::read(const ConstTensorView& from,
                   const std::function<void(const std::byte*, std::size_t)>& sink) {
  for (std::size_t at = 0; at < from.bytes(); at += buffer_.bytes()) {
    const std::size_t n = std::min(buffer_.bytes(), from.bytes() - at);
    const ConstTensorView piece(
        from.data() + at, DType::u8, Shape{static_cast<std::int64_t>(n)}, from.device());
    copy_tensor(as_bytes(buffer_.data(), n, kCpu), piece, stream_);
    stream_.synchronize();
    sink(buffer_.data(), n);
  }
}

void Staging::write(const TensorView& to, const std::byte* from) {
  for (std::size_t at = 0; at < to.bytes(); at += buffer_.bytes()) {
    const std::size_t n = std::min(buffer_.bytes(), to.bytes() - at);
    std::copy_n(from + at, n, buffer_.data());
    copy_tensor(
        as_bytes(to.data() + at, n, to.device()), as_bytes(buffer_.data(), n, kCpu), stream_);
    stream_.synchronize();
  }
}

void write_data_file(const std::filesystem::path& folder,
                     const PlannedFile& file,
                     Staging& staging,
                     Manifest& manifest) {
  const auto path = folder / file.name;
  std::vector<StoredTensor> entries;
  for (const auto* t : file.tensors)
    entries.push_back({t->name, t->view.dtype(), t->view.shape()});
  safetensors::place(entries);
  // Readers of published checkpoints expect the entry "format".
  const std::string header = safetensors::header_text(entries, {{"format", "pt"}}, path.string());
  DurableFile out(path, DurableFile::Mode::create);
  out.write(header);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto& e = entries[i];
    std::uint32_t crc = 0;
    staging.read(file.tensors[i]->view, [&](const std::byte* data, std::size_t bytes) {
      crc = crc32c(data, bytes, crc);
      out.write(data, bytes);
    });
    manifest.tensors.push_back(
        {e.name, e.dtype, e.shape, manifest.files.size(), header.size() + e.offset, e.bytes, crc});
  }
  out.finish();
  manifest.files.push_back({file.name, out.bytes(), out.crc()});
}

}  // namespace moesaic
