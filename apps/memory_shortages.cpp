#include "apps/memory_shortages.h"

#include <sstream>

namespace moesaic::apps {
namespace {

using Where = MemoryShortage::Where;

// The first of the largest needs of a kind.
const MemoryShortage* largest_of(const std::vector<Shortage>& all,
                                 Where where,
                                 const std::function<std::string(int)>& who,
                                 std::string& text) {
  const MemoryShortage* most = nullptr;
  int index = 0;
  bool is_same = true;  // of all
  for (int i = 0; i < static_cast<int>(all.size()); ++i) {
    const Shortage& s = all[static_cast<std::size_t>(i)];
    const bool lacks = s && s->where() == where;
    is_same = is_same && lacks && (most == nullptr || s->needed() == most->needed());
    if (!lacks || (most != nullptr && s->needed() <= most->needed())) continue;
    most = &*s;
    index = i;
  }
  if (most != nullptr) text = (is_same ? "" : who(index) + ": ") + most->what();
  return most;
}

}  // namespace

Shortage largest(const std::vector<Shortage>& all, const std::function<std::string(int)>& who) {
  std::string of_device, of_host;
  const MemoryShortage* device = largest_of(all, Where::device, who, of_device);
  const MemoryShortage* host = largest_of(all, Where::host, who, of_host);
  if (device != nullptr && host != nullptr)
    return MemoryShortage(Where::device, device->needed(), of_device + "\n" + of_host);
  if (device != nullptr) return MemoryShortage(Where::device, device->needed(), of_device);
  if (host != nullptr) return MemoryShortage(Where::host, host->needed(), of_host);
  return std::nullopt;
}

void plan_on_all_ranks(Communicator& host,
                       const std::function<void()>& plan,
                       const std::function<std::string(int)>& who) {
  Shortage mine;
  try {
    plan();
  } catch (const MemoryShortage& e) {
    mine = e;
  }
  std::vector<Shortage> all;
  for (const std::string& text : host.all_gather_host(packed(mine)))
    all.push_back(unpacked_shortage(text));
  if (const Shortage most = largest(all, who)) throw *most;
}

std::string packed(const Shortage& shortage) {
  if (!shortage) return "";
  return std::to_string(static_cast<int>(shortage->where())) + " " +
         std::to_string(shortage->needed()) + " " + shortage->what();
}

Shortage unpacked_shortage(const std::string& text) {
  if (text.empty()) return std::nullopt;
  std::istringstream stream(text);
  int where = 0;
  std::uint64_t needed = 0;
  stream >> where >> needed;
  stream.get();  // the blank
  return MemoryShortage(
      static_cast<Where>(where), needed, text.substr(static_cast<std::size_t>(stream.tellg())));
}

}  // namespace moesaic::apps
