#include "core/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/checkpoint/safetensors_header.h"

namespace moesaic {
namespace {

// A file descriptor that closes itself; close errors matter for writers only, which call close_checked().
class File {
 public:
  File(const std::filesystem::path& path, int flags, mode_t mode = 0) : fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }
  int close_checked() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

[[noreturn]] void write_failed(const std::filesystem::path& path, const char* what) {
  throw ResourceError(fmt::format("{}: {} failed: {}", path.string(), what, std::strerror(errno)));
}

void write_all(const File& file, const void* data, std::size_t bytes, const std::filesystem::path& path) {
  const auto* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(file.get(), p, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) write_failed(path, "write");
    p += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

std::string header_text(const std::vector<const NamedTensor*>& order, const std::map<std::string, std::string>& metadata,
                        const std::filesystem::path& path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t at = 0;
  for (const auto* t : order) {
    MOESAIC_CHECK(!header.contains(t->name), "two tensors named " + t->name);
    std::vector<std::int64_t> shape;
    for (int i = 0; i < t->view.rank(); ++i) shape.push_back(t->view.dim(i));
    header[t->name] = {{"dtype", safetensors::stored_name(t->view.dtype())},
                       {"shape", shape},
                       {"data_offsets", {at, at + t->view.bytes()}}};
    at += t->view.bytes();
  }
  try {
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
    return text;
  } catch (const nlohmann::json::exception& e) {
    throw InputError(fmt::format("{}: a name or metadata text is not UTF-8: {}", path.string(), e.what()));
  }
}

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(std::filesystem::path p) : path(std::move(p)) {
    const std::string file = path.string();
    const File f(path, O_RDONLY);
    if (f.get() < 0) throw InputError(fmt::format("{}: cannot open: {}", file, std::strerror(errno)));
    struct stat info {};
    if (::fstat(f.get(), &info) != 0) throw InputError(fmt::format("{}: cannot stat: {}", file, std::strerror(errno)));
    if (!S_ISREG(info.st_mode)) throw InputError(fmt::format("{}: not a regular file", file));
    size = static_cast<std::size_t>(info.st_size);
    if (size < 8) throw InputError(fmt::format("{}: {} bytes are too few for a safetensors file", file, size));
    void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, f.get(), 0);
    if (mapped == MAP_FAILED) throw ResourceError(fmt::format("{}: cannot map {} bytes: {}", file, size, std::strerror(errno)));
    bytes = static_cast<const std::byte*>(mapped);
    try {
      read_header(file);
    } catch (...) {
      unmap();
      throw;
    }
  }
  ~Impl() { unmap(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void read_header(const std::string& file) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes, 8);
    if (length > safetensors::kMaxHeaderBytes) {
      throw InputError(fmt::format("{}: header length {} at offset 0 is above the limit of {}", file, length, safetensors::kMaxHeaderBytes));
    }
    if (length > size - 8) {
      throw InputError(fmt::format("{}: header length {} at offset 0, but only {} bytes follow: truncated?", file, length, size - 8));
    }
    data = bytes + 8 + length;
    header = safetensors::parse_header({reinterpret_cast<const char*>(bytes + 8), static_cast<std::size_t>(length)}, size - 8 - length, file);
  }
  void unmap() noexcept { ::munmap(const_cast<std::byte*>(bytes), size); }

  std::filesystem::path path;
  const std::byte* bytes = nullptr;
  std::size_t size = 0;
  const std::byte* data = nullptr;
  safetensors::Header header;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : impl_(std::make_shared<const Impl>(path)) {}
const std::filesystem::path& SafetensorsFile::path() const noexcept { return impl_->path; }
const std::map<std::string, StoredTensor>& SafetensorsFile::tensors() const noexcept { return impl_->header.tensors; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept { return impl_->header.metadata; }
bool SafetensorsFile::contains(const std::string& name) const noexcept { return impl_->header.tensors.contains(name); }

ConstTensorView SafetensorsFile::view(const std::string& name) const {
  const auto found = impl_->header.tensors.find(name);
  if (found == impl_->header.tensors.end()) throw InputError(fmt::format("{}: no tensor '{}'", impl_->path.string(), name));
  return {impl_->data + found->second.offset, found->second.dtype, found->second.shape};
}

void write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<const NamedTensor*> order;
  for (const auto& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return byte_size(a->view.dtype()) > byte_size(b->view.dtype());
  });
  const std::string header = header_text(order, metadata, path);
  File file(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file.get() < 0) write_failed(path, "open");
  const std::uint64_t length = header.size();
  write_all(file, &length, 8, path);
  write_all(file, header.data(), header.size(), path);
  for (const auto* t : order) write_all(file, t->view.data(), t->view.bytes(), path);
  if (::fsync(file.get()) != 0) write_failed(path, "fsync");
  if (file.close_checked() != 0) write_failed(path, "close");
}

}  // namespace moesaic
