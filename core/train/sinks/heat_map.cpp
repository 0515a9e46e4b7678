#include "core/train/sinks/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include <zlib.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

// A picture of about this size, of whole pixels per cell.
constexpr int kWantedWidth = 1024, kWantedHeight = 512, kLargestCell = 24;
constexpr std::uint8_t kDead = 255;  // index in the palette; 0 to 254 is the scale
constexpr double kOctaves = 2;       // of the scale, to each side of the mean

std::string palette() {
  constexpr std::array<std::array<double, 3>, 3> kAnchors{
      {{0, 34, 78}, {124, 123, 120}, {254, 232, 56}}};
  std::string colors;
  for (int i = 0; i < kDead; ++i) {
    const double at = 2.0 * i / (kDead - 1);
    const auto left = static_cast<std::size_t>(std::min(1.0, std::floor(at)));
    for (std::size_t c = 0; c < 3; ++c) {
      const double x = kAnchors[left][c] + (at - static_cast<double>(left)) *
                                               (kAnchors[left + 1][c] - kAnchors[left][c]);
      colors += static_cast<char>(static_cast<std::uint8_t>(std::lround(x)));
    }
  }
  return colors + "\xff" + std::string(1, '\0') + "\xff";
}

std::uint8_t color_of(std::int64_t tokens, double mean) {
  if (tokens == 0) return kDead;
  const double octaves = std::log2(static_cast<double>(tokens) / mean);
  const double at = std::clamp(0.5 + octaves / (2 * kOctaves), 0.0, 1.0);
  return static_cast<std::uint8_t>(std::lround(at * (kDead - 1)));
}

void put_big_endian(std::string& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8)
    out += static_cast<char>(value >> shift & 0xff);
}

void put_chunk(std::string& out, const std::string& type, const std::string& data) {
  put_big_endian(out, static_cast<std::uint32_t>(data.size()));
  const std::string body = type + data;
  out += body;
  put_big_endian(
      out,
      static_cast<std::uint32_t>(
          crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()))));
}

std::string deflated(const std::string& bytes) {
  uLongf size = compressBound(bytes.size());
  std::string out(size, '\0');
  const int result = compress2(reinterpret_cast<Bytef*>(out.data()),
                               &size,
                               reinterpret_cast<const Bytef*>(bytes.data()),
                               bytes.size(),
                               Z_BEST_SPEED);
  MOESAIC_CHECK(result == Z_OK, "zlib could not compress");
  out.resize(size);
  return out;
}

// 8 bits per pixel into the palette, rows without filter.
std::string png_of(int width, int height, const std::string& rows) {
  std::string png("\x89PNG\r\n\x1a\n");
  std::string header;
  put_big_endian(header, static_cast<std::uint32_t>(width));
  put_big_endian(header, static_cast<std::uint32_t>(height));
  header += std::string{8, 3, 0, 0, 0};  // depth, palette, deflate, filters, no interlacing
  put_chunk(png, "IHDR", header);
  put_chunk(png, "PLTE", palette());
  put_chunk(png, "IDAT", deflated(rows));
  put_chunk(png, "IEND", "");
  return png;
}

}  // namespace

Image expert_heat_map(std::span<const ExpertLoad> layers) {
  std::vector<const ExpertLoad*> rows;
  std::size_t experts = 0;
  for (const auto& layer : layers) {
    if (layer.tokens.empty()) continue;
    rows.push_back(&layer);
    experts = std::max(experts, layer.tokens.size());
  }
  if (rows.empty()) return {};
  const int cell_width = std::clamp(kWantedWidth / static_cast<int>(experts), 1, kLargestCell),
            cell_height =
                std::clamp(kWantedHeight / static_cast<int>(rows.size()), 1, kLargestCell);
  std::string pixels;
  for (const ExpertLoad* layer : rows) {
    double sum = 0;
    for (const std::int64_t n : layer->tokens)
      sum += static_cast<double>(n);
    const double mean = sum / static_cast<double>(layer->tokens.size());
    std::string row(1, '\0');  // no filter
    for (std::size_t e = 0; e < experts; ++e) {
      const std::int64_t n = e < layer->tokens.size() ? layer->tokens[e] : 0;
      row.append(static_cast<std::size_t>(cell_width), static_cast<char>(color_of(n, mean)));
    }
    for (int y = 0; y < cell_height; ++y)
      pixels += row;
  }
  Image image{cell_width * static_cast<int>(experts), cell_height * static_cast<int>(rows.size())};
  image.png = png_of(image.width, image.height, pixels);
  return image;
}

}  // namespace moesaic
