#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/tensor.h"

namespace moesaic {

/// One entry of a safetensors file. BOOL is read as u8.
struct StoredTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::uint64_t offset = 0;  ///< bytes from the start of the data section
  std::uint64_t bytes = 0;
};

/// A safetensors file, mapped read-only and checked on opening: header length, JSON (depth, duplicate names), dtypes,
/// shapes without overflow, spans inside the file, contiguous and without holes or overlap, the whole file covered.
/// Throws InputError with file, offset or tensor. Source: the safetensors format description.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  const std::filesystem::path& path() const noexcept;
  const std::map<std::string, StoredTensor>& tensors() const noexcept;
  const std::map<std::string, std::string>& metadata() const noexcept;  ///< the __metadata__ entry
  bool contains(const std::string& name) const noexcept;
  /// The mapped bytes; throws InputError naming the file when there is no such tensor.
  ConstTensorView view(const std::string& name) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

/// A tensor to write: host memory.
struct NamedTensor {
  std::string name;
  ConstTensorView view;
};

/// Writes `tensors` (larger element types first, then by the given order) with metadata, fsyncs and closes; every return
/// value is checked. Throws ResourceError (path, cause). Not atomic: the caller renames.
void write_safetensors(const std::filesystem::path& path,
                       std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace moesaic
