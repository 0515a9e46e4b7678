#include "core/checkpoint/reader.h"

#include <utility>

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"

namespace moesaic {

CheckpointReader::CheckpointReader(std::filesystem::path checkpoint)
    : path_(std::move(checkpoint)), manifest_(read_manifest(path_)) {
  files_.resize(manifest_.files.size());
  for (const ManifestTensor& t : manifest_.tensors) {
    Tensor& tensor = tensors_[t.name];
    tensor.name = t.name;
    tensor.dtype = t.dtype;
    tensor.shape = t.whole();
    tensor.bytes += t.bytes;
    tensor.pieces.push_back(&t);
  }
}
CheckpointReader::~CheckpointReader() = default;

const std::byte* CheckpointReader::checked(const ManifestTensor& piece) {
  const std::filesystem::path file = path_ / manifest_.files[piece.file].name;
  auto& mapped = files_[piece.file];
  if (mapped == nullptr) mapped = std::make_unique<MappedFile>(file, MappedFile::Links::refuse);
  if (mapped->size() != manifest_.files[piece.file].bytes)
    throw InputError(fmt::format("{}: its size has changed", file.string()));
  const std::byte* bytes = mapped->data() + piece.offset;
  if (const std::uint32_t crc = crc32c(bytes, piece.bytes); crc != piece.crc)
    throw InputError(
        fmt::format("{}: damaged in tensor '{}', bytes {} to {}: checksum {:08x}, expected {:08x}",
                    file.string(),
                    piece.name,
                    piece.offset,
                    piece.offset + piece.bytes,
                    crc,
                    piece.crc));
  return bytes;
}

const std::byte* CheckpointReader::read(const Tensor& tensor) {
  if (tensor.pieces.size() == 1) return checked(*tensor.pieces.front());
  whole_.resize(tensor.bytes);
  for (const ManifestTensor* piece : tensor.pieces) {
    const std::byte* bytes = checked(*piece);
    if (piece->bytes > 0)
      copy_box(whole_.data(),
               whole_box(tensor.shape),
               bytes,
               piece->box(),
               piece->box(),
               byte_size(tensor.dtype));
  }
  return whole_.data();
}

}  // namespace moesaic
