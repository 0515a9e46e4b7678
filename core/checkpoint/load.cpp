#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include <fmt/format.h>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/data_files.h"
#include "core/checkpoint/manifest.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxProblems = 1000;  // lines of one message

using Wanted = std::map<std::string, const StateTensor*>;

std::string kind(DType dtype, const Shape& shape) {
  return fmt::format("{} {}", name(dtype), to_string(shape));
}

// What only says where things were: nothing is lost with it.
bool is_optional(std::string_view tensor) {
  return tensor.starts_with("buffer/optional/");
}

// Everything in which the checkpoint and the run's tensors differ.
std::vector<std::string> differences(const Manifest& manifest, const Wanted& wanted, bool strict) {
  std::vector<std::string> problems;
  std::set<std::string_view> found;  // or reported
  for (const auto& t : manifest.tensors) {
    const auto w = wanted.find(t.name);
    if (w == wanted.end()) {
      if (strict && !is_optional(t.name) && found.insert(t.name).second)
        problems.push_back(fmt::format(
            "unexpected: '{}' {} is not part of this run", t.name, kind(t.dtype, t.whole())));
      continue;
    }
    const Shape& whole = w->second->whole();
    if (!found.insert(t.name).second) continue;  // another piece of it
    if (w->second->dtype() != t.dtype || whole != t.whole()) {
      problems.push_back(fmt::format("different: '{}' is {}, expected {}",
                                     t.name,
                                     kind(t.dtype, t.whole()),
                                     kind(w->second->dtype(), whole)));
    }
  }
  for (const auto& [tensor, w] : wanted) {
    if (!found.contains(tensor) && !is_optional(tensor))
      problems.push_back(
          fmt::format("missing: '{}', expected {}", tensor, kind(w->dtype(), w->whole())));
  }
  return problems;
}

Wanted by_name(std::span<const StateTensor> tensors) {
  Wanted wanted;
  for (const auto& t : tensors)
    MOESAIC_CHECK(wanted.emplace(t.name, &t).second, "two tensors named " + t.name);
  return wanted;
}

// The tensors of one file, by their place.
std::vector<const ManifestTensor*> tensors_of(const Manifest& manifest, std::size_t file) {
  std::vector<const ManifestTensor*> list;
  for (const auto& t : manifest.tensors) {
    if (t.file == file) list.push_back(&t);
  }
  std::sort(
      list.begin(), list.end(), [](const auto* a, const auto* b) { return a->offset < b->offset; });
  return list;
}

// Throws InputError naming the damaged tensors, or the header, unless all bytes are those that were
// written.
void check_bytes(const MappedFile& mapped,
                 const fs::path& path,
                 const ManifestFile& file,
                 const std::vector<const ManifestTensor*>& tensors,
                 const ByteProgress& progress = {}) {
  if (mapped.size() != file.bytes) {
    throw InputError(fmt::format(
        "{}: has {} bytes, the manifest says {}", path.string(), mapped.size(), file.bytes));
  }
  std::uint32_t crc = 0;
  for (std::size_t at = 0; at < mapped.size(); at += kStagingBytes) {
    const std::size_t bytes = std::min(kStagingBytes, mapped.size() - at);
    crc = crc32c(mapped.data() + at, bytes, crc);
    progress.add(bytes);
  }
  if (crc == file.crc) return;
  std::string where;
  for (const auto* t : tensors) {
    const std::uint32_t found = crc32c(mapped.data() + t->offset, t->bytes);
    if (found == t->crc) continue;
    where += fmt::format("\n  in tensor '{}', bytes {} to {}: checksum {:08x}, expected {:08x}",
                         t->name,
                         t->offset,
                         t->offset + t->bytes,
                         found,
                         t->crc);
  }
  if (where.empty()) where = "\n  in the header, outside of all tensors";
  throw InputError(fmt::format("{}: damaged: checksum {:08x}, the manifest says {:08x}{}",
                               path.string(),
                               crc,
                               file.crc,
                               where));
}

// Tensors whose pieces in the files are not those that are wanted. Their files stay mapped until all were checked.
class Assembly {
 public:
  void keep(const StateTensor& wanted,
            const ManifestTensor& piece,
            const std::shared_ptr<const MappedFile>& file) {
    pieces_[&wanted].push_back({&piece, file});
  }

  void write_all(Staging& staging) const {
    std::vector<std::byte> memory;
    for (const auto& [wanted, pieces] : pieces_) {
      const Box box = box_of(*wanted);
      const std::size_t element = byte_size(wanted->dtype());
      memory.resize(std::max<std::size_t>(wanted->bytes(), 1));
      for (const auto& [piece, file] : pieces) {
        if (const auto part = intersection(box, piece->box()))
          copy_box(memory.data(), box, file->data() + piece->offset, piece->box(), *part, element);
      }
      staging.write(*wanted, memory.data());
    }
  }

  static Box box_of(const StateTensor& t) {
    return t.place ? Box{t.place->begin, t.shape()} : whole_box(t.shape());
  }

 private:
  struct Piece {
    const ManifestTensor* entry;
    std::shared_ptr<const MappedFile> file;
  };
  std::map<const StateTensor*, std::vector<Piece>> pieces_;
};

}  // namespace

std::vector<std::string> checkpoint_differences(const fs::path& checkpoint,
                                                std::span<const StateTensor> tensors,
                                                bool strict) {
  return differences(read_manifest(checkpoint), by_name(tensors), strict);
}

std::string misfit_text(const fs::path& checkpoint, const std::vector<std::string>& differences) {
  std::string text = fmt::format("{}: does not fit the configuration of this run, {} tensor(s):",
                                 checkpoint.string(),
                                 differences.size());
  for (std::size_t i = 0; i < std::min(differences.size(), kMaxProblems); ++i)
    text += "\n  " + differences[i];
  if (differences.size() > kMaxProblems)
    text += fmt::format("\n  and {} more", differences.size() - kMaxProblems);
  return text;
}

StateValues load_checkpoint(const fs::path& checkpoint,
                            std::span<const StateTensor> tensors,
                            bool strict,
                            Stream& stream,
                            const ByteProgress& progress) {
  const Manifest manifest = read_manifest(checkpoint);
  const Wanted wanted = by_name(tensors);
  std::size_t largest = 0;
  for (const auto& t : tensors)
    largest = std::max(largest, t.bytes());
  if (const auto problems = differences(manifest, wanted, strict); !problems.empty())
    throw CheckpointMisfit(misfit_text(checkpoint, problems));
  Staging staging(stream, std::min(largest, kStagingBytes));
  Assembly assembly;
  std::set<std::size_t> needed;
  for (const auto& t : manifest.tensors)
    if (wanted.contains(t.name)) needed.insert(t.file);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < manifest.files.size(); ++i)
    if (strict || needed.contains(i)) total += manifest.files[i].bytes;
  progress.begin(total);
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (!strict && !needed.contains(i)) continue;
    const auto in_file = tensors_of(manifest, i);
    const fs::path path = checkpoint / manifest.files[i].name;
    const auto mapped = std::make_shared<const MappedFile>(path, MappedFile::Links::refuse);
    check_bytes(*mapped, path, manifest.files[i], in_file, progress);
    for (const auto* t : in_file) {
      const auto w = wanted.find(t->name);
      if (w == wanted.end()) continue;
      if (t->box() == Assembly::box_of(*w->second)) {
        staging.write(*w->second, mapped->data() + t->offset);
      } else if (intersection(t->box(), Assembly::box_of(*w->second))) {
        assembly.keep(*w->second, *t, mapped);
      }
    }
  }
  assembly.write_all(staging);
  return manifest.values;
}

std::string checkpoint_config(const fs::path& checkpoint) {
  return read_manifest(checkpoint).config;
}

void verify_checkpoint(const fs::path& checkpoint) {
  const Manifest manifest = read_manifest(checkpoint);
  std::string problems;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const fs::path path = checkpoint / manifest.files[i].name;
    try {
      check_bytes(MappedFile(path, MappedFile::Links::refuse),
                  path,
                  manifest.files[i],
                  tensors_of(manifest, i));
    } catch (const InputError& e) {
      problems += (problems.empty() ? "" : "\n") + std::string(e.what());
    }
  }
  if (!problems.empty()) throw InputError(problems);
}

}  // namespace moesaic
