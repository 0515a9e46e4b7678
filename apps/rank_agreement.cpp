#include "apps/rank_agreement.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <vector>

#include <elf.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include "apps/config_changes.h"
#include "core/base/crc32c.h"
#include "core/base/error.h"

namespace moesaic::apps {
namespace {

// "key: value" of every line that sets one; neither comments nor where a value came from.
std::string values_of(const std::string& yaml) {
  std::string values;
  for (const ConfigChange& c : config_changes("", yaml))
    values += fmt::format("{}: {}\n", c.key, c.after);
  return values;
}

std::string hash(const std::string& text) {
  return fmt::format("{:08x}:{}", crc32c(text.data(), text.size()), text.size());
}

std::string named(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  const auto n = static_cast<std::ptrdiff_t>(std::min(ranks.size(), kNamed));
  std::string text = fmt::format(
      "rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks.begin(), ranks.begin() + n, ", "));
  if (ranks.size() > kNamed) text += fmt::format(" and {} more", ranks.size() - kNamed);
  return text;
}

// Ranks other than the first whose text is not rank 0's.
std::vector<int> differing(const std::vector<std::string>& texts) {
  std::vector<int> ranks;
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] != texts[0]) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

// Those of `ranks` whose text is the first one's.
std::vector<int> alike(const std::vector<std::string>& texts, const std::vector<int>& ranks) {
  std::vector<int> same;
  for (const int r : ranks) {
    if (texts[static_cast<std::size_t>(r)] == texts[static_cast<std::size_t>(ranks[0])])
      same.push_back(r);
  }
  return same;
}

std::string config_problem(std::vector<std::string> configs) {
  for (std::string& config : configs)  // origins and comments may differ
    config = values_of(config);
  const auto ranks = differing(configs);
  const auto same = alike(configs, ranks);
  const auto changes = config_changes(configs[0], configs[static_cast<std::size_t>(ranks[0])]);
  std::string text = "the ranks were started with different configurations: ";
  if (changes.empty()) return text + named(ranks) + " read another text than rank 0";
  const ConfigChange& first = changes.front();
  text +=
      fmt::format("{}: {} (rank 0) -> {} ({})", first.key, first.before, first.after, named(same));
  if (changes.size() > 1) text += fmt::format("; {} more key(s) differ there", changes.size() - 1);
  if (same.size() < ranks.size())
    text += fmt::format("; {} rank(s) differ in other ways", ranks.size() - same.size());
  return text +
         ". Give all ranks the same file and the same a.b=c; a file on a disk of each machine must "
         "be the same everywhere";
}

std::string program_problem(const std::vector<std::string>& programs) {
  const auto ranks = differing(programs);
  const auto same = alike(programs, ranks);
  std::istringstream ours(programs[0]), theirs(programs[static_cast<std::size_t>(ranks[0])]);
  std::string before, after;
  while (std::getline(ours, before) && std::getline(theirs, after) && before == after) {
  }
  return fmt::format(
      "the ranks run different programs: {} (rank 0) -> {} ({}). Install the same build on all "
      "machines",
      before,
      after,
      named(same.size() == ranks.size() ? ranks : same));
}

}  // namespace

void require_agreement(Communicator& host, const RankFacts& own) {
  if (host.size() == 1) return;
  const std::string values = values_of(own.config);
  // Hashes first: texts of a thousand ranks are not sent about for nothing.
  const auto hashes = host.all_gather_host(hash(values) + " " + hash(own.program));
  if (differing(hashes).empty()) return;
  const auto programs = host.all_gather_host(own.program);
  const auto configs = host.all_gather_host(own.config);
  if (!differing(programs).empty()) throw UsageError(program_problem(programs));
  throw UsageError(config_problem(configs));
}

namespace {

// The first note of the program itself that holds a build id.
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

}  // namespace

std::string build_id() {
  std::string id;
  dl_iterate_phdr(find_build_id, &id);
  return id;
}

}  // namespace moesaic::apps
