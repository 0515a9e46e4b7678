#pragma once
// Reading single tensors of a checkpoint, for tools.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/checkpoint/manifest.h"

namespace moesaic {

class MappedFile;

/// A checkpoint's tensors one by one, pieces put together. Every piece is checked against its checksum before its bytes
/// are given out. Throws InputError as load_checkpoint() does.
class CheckpointReader {
 public:
  explicit CheckpointReader(std::filesystem::path checkpoint);
  ~CheckpointReader();

  struct Tensor {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;                                ///< of the whole
    std::uint64_t bytes = 0;                    ///< of the whole
    std::vector<const ManifestTensor*> pieces;  ///< one, when it is whole
  };
  const std::filesystem::path& path() const noexcept { return path_; }
  const Manifest& manifest() const noexcept { return manifest_; }
  const std::map<std::string, Tensor>& tensors() const noexcept { return tensors_; }
  /// Host memory, valid until the next call; not aligned.
  const std::byte* read(const Tensor& tensor);

 private:
  const std::byte* checked(const ManifestTensor& piece);

  std::filesystem::path path_;
  Manifest manifest_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::unique_ptr<MappedFile>> files_;  // opened at first use
  std::vector<std::byte> whole_;
};

}  // namespace moesaic
