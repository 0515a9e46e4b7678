#include "core/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/checkpoint/safetensors_header.h"

namespace moesaic {

struct SafetensorsFile::Impl {
  explicit Impl(std::filesystem::path p)
      : path(std::move(p)), mapped(path, MappedFile::Links::follow) {
    const std::string file = path.string();
    if (mapped.size() < 8) {
      throw InputError(
          fmt::format("{}: {} bytes are too few for a safetensors file", file, mapped.size()));
    }
    read_header(file);
  }

  void read_header(const std::string& file) {
    const std::byte* bytes = mapped.data();
    const std::size_t size = mapped.size();
    std::uint64_t length = 0;
    std::memcpy(&length, bytes, 8);
    if (length > safetensors::kMaxHeaderBytes) {
      throw InputError(fmt::format("{}: header length {} at offset 0 is above the limit of {}",
                                   file,
                                   length,
                                   safetensors::kMaxHeaderBytes));
    }
    if (length > size - 8) {
      throw InputError(
          fmt::format("{}: header length {} at offset 0, but only {} bytes follow: truncated?",
                      file,
                      length,
                      size - 8));
    }
    data = bytes + 8 + length;
    header = safetensors::parse_header(
        {reinterpret_cast<const char*>(bytes + 8), static_cast<std::size_t>(length)},
        size - 8 - length,
        file);
  }

  std::filesystem::path path;
  MappedFile mapped;
  const std::byte* data = nullptr;
  safetensors::Header header;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : impl_(std::make_shared<const Impl>(path)) {}
const std::filesystem::path& SafetensorsFile::path() const noexcept {
  return impl_->path;
}
const std::map<std::string, StoredTensor>& SafetensorsFile::tensors() const noexcept {
  return impl_->header.tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return impl_->header.metadata;
}
bool SafetensorsFile::contains(const std::string& name) const noexcept {
  return impl_->header.tensors.contains(name);
}

ConstTensorView SafetensorsFile::view(const std::string& name) const {
  const auto found = impl_->header.tensors.find(name);
  if (found == impl_->header.tensors.end())
    throw InputError(fmt::format("{}: no tensor '{}'", impl_->path.string(), name));
  return {impl_->data + found->second.offset, found->second.dtype, found->second.shape};
}

void write_safetensors(const std::filesystem::path& path,
                       std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  for (const auto& t : tensors)
    order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return byte_size(a->view.dtype()) > byte_size(b->view.dtype());
  });
  std::vector<StoredTensor> entries;
  for (const auto* t : order)
    entries.push_back({t->name, t->view.dtype(), t->view.shape()});
  safetensors::place(entries);
  const std::string header = safetensors::header_text(entries, metadata, path.string());
  DurableFile file(path, DurableFile::Mode::replace);
  file.write(header);
  for (const auto* t : order)
    file.write(t->view.data(), t->view.bytes());
  file.finish();
}

}  // namespace moesaic
