#pragma once
// How the tensors of a checkpoint are spread over its files; used by the files of this folder and
// their tests.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/byte_progress.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"
#include "memory/buffer.h"

namespace moesaic {

struct PlannedFile {
  std::string name;
  std::vector<const StateTensor*>
      tensors;  ///< in the order of the file: larger element types first
};

/// "optimizer/…" goes to optimizer.safetensors, "ema/…" to ema.safetensors, "buffer/…" to
/// buffers.safetensors, all else to model.safetensors. A kind with more than `max_bytes` is cut,
/// between tensors, into model-00001-of-00003.safetensors, …. The name of a `writer`, if any, follows the kind:
/// model-rank00003.safetensors.
std::vector<PlannedFile> plan_files(std::span<const StateTensor> tensors,
                                    std::uint64_t max_bytes,
                                    const std::string& writer = "");

/// Copies between tensors on the run's device and host memory in pieces, through one buffer (pinned
/// on a CUDA run). Each call waits for the stream.
class Staging {
 public:
  /// A buffer for pieces of at most `bytes` bytes (rounded up to whole numbers).
  Staging(Stream& stream, std::size_t bytes);
  /// The bytes that files hold of a tensor: split ones go through as f32. What is not in a view brings itself.
  void read(const StateTensor& from, const StateAccess::Sink& sink);
  void write(const StateTensor& to, const std::byte* from);

 private:
  void download(const ConstTensorView& from, std::size_t at, std::byte* to, std::size_t bytes);
  void upload(const TensorView& to, std::size_t at, const std::byte* from, std::size_t bytes);
  void read_split(const StateTensor& from, const StateAccess::Sink& sink);
  void write_split(const StateTensor& to, const std::byte* from);

  Stream& stream_;
  Buffer buffer_;
};

constexpr std::size_t kStagingBytes = std::size_t{32} << 20;

/// The name in the data file: that of the tensor, followed for a piece by its place, as in "model.w[0:4,2:7]".
std::string stored_name(const StateTensor& tensor);

/// Writes one safetensors file and its lines of the manifest.
void write_data_file(const std::filesystem::path& folder,
                     const PlannedFile& file,
                     Staging& staging,
                     Manifest& manifest,
                     const ByteProgress& progress = {});

}  // namespace moesaic
