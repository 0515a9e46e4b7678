#include "comm/status_board.h"

#include <fstream>
#include <sstream>
#include <system_error>

#include <fmt/format.h>

namespace moesaic {

namespace fs = std::filesystem;

fs::path StatusBoard::file_of(int rank) const {
  return folder_ / fmt::format("rank-{:05}", rank);
}

bool StatusBoard::write(const RankStatus& status) const noexcept {
  try {
    const fs::path file = file_of(status.rank);
    fs::path fresh = file;
    fresh += ".new";
    std::ofstream out(fresh, std::ios::trunc);
    out << status.text();
    out.close();
    if (!out) return false;
    std::error_code error;
    fs::rename(fresh, file, error);
    return !error;
  } catch (const std::exception&) {
    return false;
  }
}

std::optional<RankStatus> StatusBoard::read(int rank) const noexcept {
  try {
    std::ifstream in(file_of(rank));
    if (!in) return std::nullopt;
    std::ostringstream text;
    text << in.rdbuf();
    return RankStatus::parse(text.str());
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void StatusBoard::remove(int rank) const noexcept {
  std::error_code error;
  fs::remove(file_of(rank), error);
  fs::remove(folder_, error);  // fails while other ranks have files there
}

}  // namespace moesaic
