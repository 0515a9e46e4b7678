#pragma once
// manifest.json of a checkpoint (docs/checkpoint_format.md); used by the files of this folder, the tools and
// their tests.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/checkpoint/boxes.h"
#include "core/checkpoint/checkpoint.h"

namespace moesaic {

constexpr std::int64_t kManifestSchema = 1;
constexpr std::int64_t kManifestSchemaOfPieces = 2;  // some tensors lie in pieces
constexpr std::size_t kMaxPieces = 4096;             // of one tensor
constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 30;
constexpr const char* kManifestName = "manifest.json";

struct ManifestFile {
  std::string name;  ///< [A-Za-z0-9._-]+, not beginning with a dot
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;  ///< CRC-32C of the whole file
};

struct ManifestTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::size_t file = 0;      ///< index into Manifest::files
  std::uint64_t offset = 0;  ///< from the start of the file
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
  /// A piece of a tensor: its shape, and where this piece of `shape` begins in it. Other entries hold the other pieces.
  std::optional<StateTensor::Place> place = {};

  Shape whole() const { return place ? place->whole : shape; }
  Box box() const { return place ? Box{place->begin, shape} : whole_box(shape); }
};

struct Manifest {
  std::int64_t step = 0;
  StateValues values;
  std::string config;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
};

/// The bytes of manifest.json: JSON whose last member is the checksum of all bytes before it.
/// Throws InputError for a text that is not UTF-8.
std::string manifest_text(const Manifest& manifest);

/// Parses and checks: checksum, schema, depth, types, ranges, duplicate keys and names, file names
/// without folders, tensors inside their files and sizes that fit their shapes. Throws InputError;
/// `file` is what it names.
Manifest parse_manifest(std::string_view text, const std::string& file);

/// The same for what one of several writers wrote (write_checkpoint_part()): the other pieces of its tensors may be missing.
Manifest parse_manifest_part(std::string_view text);

/// Reads the manifest of a checkpoint folder and checks it against the folder: it exists, its step
/// is the one in the folder's name, all files of its table are there with their sizes. Throws
/// InputError.
Manifest read_manifest(const std::filesystem::path& checkpoint);

/// "step-00000100"
std::string folder_name(std::int64_t step);
/// The step of such a name, -1 for any other text.
std::int64_t step_of_folder(const std::string& name);

}  // namespace moesaic
