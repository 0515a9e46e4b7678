#include "apps/rank_agreement.h"

#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>

#include <elf.h>
#include <fmt/format.h>
#include <link.h>
#include <unistd.h>

#include "apps/config_changes.h"
#include "apps/version.h"
#include "core/base/error.h"
#include "core/data/fingerprint.h"

namespace moesaic::apps {
namespace {

constexpr std::size_t kShown = 5;  // differences in a message

// The linker's note of this program (GNU build id), in hexadecimal; two builds of one commit differ in it.
int find_build_id(dl_phdr_info* info, std::size_t /*size*/, void* found) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
    const auto* end = at + segment.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* name = at + sizeof note;
      const char* data = name + (note.n_namesz + 3) / 4 * 4;
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
          std::memcmp(name, "GNU", 4) == 0) {
        auto& text = *static_cast<std::string*>(found);
        for (std::size_t b = 0; b < note.n_descsz; ++b)
          text += fmt::format("{:02x}", static_cast<unsigned char>(data[b]));
        return 1;
      }
      at = data + (note.n_descsz + 3) / 4 * 4;
    }
  }
  return 1;  // the program comes first; its libraries do not count
}

std::string build_id() {
  std::string id;
  dl_iterate_phdr(find_build_id, &id);
  return id;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// `difference`: what this rank has against rank 0; empty where all is well.
void throw_on_all(Communicator& host, const std::string& difference, const std::string& advice) {
  const std::string mine =
      difference.empty() ? ""
                         : fmt::format("rank {} on {}: {}", host.rank(), host_name(), difference);
  for (const std::string& theirs : host.all_gather_host(mine)) {
    if (!theirs.empty()) throw UsageError(theirs + "; " + advice);
  }
}

std::string values_of(config::LoadedConfig loaded) {
  loaded.origins.clear();
  return effective_yaml(loaded);
}

std::string changed_keys(const std::string& rank0, const std::string& mine) {
  std::string text;
  const std::vector<ConfigChange> changes = config_changes(rank0, mine);
  for (std::size_t i = 0; i < changes.size() && i < kShown; ++i)
    text += fmt::format("{}{} is {}, {} on rank 0",
                        i > 0 ? ", " : "",
                        changes[i].key,
                        changes[i].after,
                        changes[i].before);
  if (changes.size() > kShown) text += fmt::format(", and {} more", changes.size() - kShown);
  return text.empty() ? "the configuration differs from that of rank 0" : text;
}

std::string shown(const data::TokenSource& source) {
  return fmt::format("{} tokens in {} documents, fingerprint {:08x}",
                     source.num_tokens(),
                     source.num_documents(),
                     data::fingerprint(source));
}

}  // namespace

void require_same_start(Communicator& host,
                        const config::LoadedConfig& loaded,
                        const std::string& resume) {
  const auto same = [&](const std::string& mine, const auto& difference, const char* advice) {
    std::string rank0 = mine;
    host.broadcast_host(rank0, 0);
    throw_on_all(host, rank0 == mine ? "" : difference(rank0), advice);
  };
  same(
      version_text() + build_id(),
      [](const std::string&) { return "another build of moesaic than rank 0's"; },
      "start the same program on every machine (compare 'moesaic --version')");
  const std::string values = values_of(loaded);
  same(
      values,
      [&](const std::string& rank0) { return changed_keys(rank0, values); },
      "all ranks need the same configuration file and arguments");
  same(
      resume,
      [&](const std::string& rank0) {
        return fmt::format("--resume is {}, {} on rank 0", resume, rank0);
      },
      "all ranks need the same arguments");
}

void require_same_data(Communicator& host, const std::vector<const data::TokenSource*>& sources) {
  for (const data::TokenSource* source : sources) {
    const std::string mine = shown(*source);
    std::string rank0 = mine;
    host.broadcast_host(rank0, 0);
    throw_on_all(
        host,
        rank0 == mine ? "" : fmt::format("{} holds {}; on rank 0 {}", source->name(), mine, rank0),
        "every rank must see the same files");
  }
}

void require_seen_by_all(Communicator& host,
                         const std::filesystem::path& folder,
                         const std::string& what) {
  std::error_code error;
  throw_on_all(host,
               std::filesystem::is_directory(folder, error)
                   ? ""
                   : fmt::format("there is no {}, which rank 0 has", folder.string()),
               fmt::format("{} must lie on storage that all machines share", what));
}

void require_one_folder(Communicator& host, const std::filesystem::path& folder) {
  std::error_code error;
  std::string name;
  if (host.rank() == 0) {
    name = fmt::format(".seen-{}-{}",
                       ::getpid(),
                       std::chrono::system_clock::now().time_since_epoch().count());
    std::ofstream probe(folder / name);
    if (!probe) throw ResourceError(fmt::format("{}: cannot create a file", folder.string()));
  }
  host.broadcast_host(name, 0);
  const bool is_seen = std::filesystem::exists(folder / name, error);
  host.barrier();
  if (host.rank() == 0) std::filesystem::remove(folder / name, error);
  throw_on_all(host,
               is_seen ? ""
                       : fmt::format("run.dir: {} is not the folder that rank 0 writes to",
                                     std::filesystem::absolute(folder, error).string()),
               "every rank writes its part of a checkpoint there, so it must lie on storage that all "
               "machines share (with data parallelism alone, parallel.zero=0 lets rank 0 write all)");
}

}  // namespace moesaic::apps
