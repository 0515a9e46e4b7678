#include "core/train/sinks/event_file.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/base/error.h"
#include "core/train/run_sink.h"

namespace moesaic {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr std::string_view kVersion = "brain.Event:2";
constexpr std::size_t kMostBars = 30;

// The wire format of protocol buffers: key = field number and kind of what follows.
enum Wire : std::uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7)
    out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

template <class T>
void put_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void put_key(std::string& out, std::uint64_t field, Wire wire) {
  put_varint(out, field << 3 | wire);
}
void put_integer(std::string& out, std::uint64_t field, std::int64_t value) {
  put_key(out, field, kVarint);
  put_varint(out, static_cast<std::uint64_t>(value));
}
void put_double(std::string& out, std::uint64_t field, double value) {
  put_key(out, field, kFixed64);
  put_raw(out, value);
}
void put_bytes(std::string& out, std::uint64_t field, std::string_view value) {
  put_key(out, field, kBytes);
  put_varint(out, value.size());
  out += value;
}
void put_doubles(std::string& out, std::uint64_t field, std::span<const double> values) {
  std::string packed;
  for (const double v : values)
    put_raw(packed, v);
  put_bytes(out, field, packed);
}

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return (crc >> 15 | crc << 17) + 0xa282ead8U;
}

std::string record_of(std::string_view event) {
  std::string record;
  put_raw(record, static_cast<std::uint64_t>(event.size()));
  put_raw(record, masked_crc(record));
  record += event;
  put_raw(record, masked_crc(event));
  return record;
}

std::string event_at(std::int64_t step) {
  std::string event;
  put_double(event, 1, unix_time());
  put_integer(event, 2, step);
  return event;
}

// Later than every file that is there, whatever the clocks of the machines say.
std::int64_t next_second(const std::filesystem::path& folder) {
  auto second = static_cast<std::int64_t>(unix_time());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    std::int64_t other = 0;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), other);
    second = std::max(second, other + 1);
  }
  return second;
}

std::filesystem::path new_path(const std::filesystem::path& folder) {
  try {
    std::filesystem::create_directories(folder);
    char host[256] = "";
    if (gethostname(host, sizeof host - 1) != 0) std::strcpy(host, "unknown");
    return folder / fmt::format("{}{:010}.{}.{}.0", kPrefix, next_second(folder), host, ::getpid());
  } catch (const std::filesystem::filesystem_error& e) {
    throw ResourceError(fmt::format("{}: {}", folder.string(), e.code().message()));
  }
}

}  // namespace

void EventSummary::value(std::string_view tag, std::string_view content) {
  std::string one;
  put_bytes(one, 1, tag);
  one += content;
  put_bytes(bytes_, 1, one);
}

void EventSummary::scalar(std::string_view tag, double v) {
  std::string content;
  put_key(content, 2, kFixed32);
  put_raw(content, static_cast<float>(v));
  value(tag, content);
}

void EventSummary::histogram(std::string_view tag, std::span<const std::int64_t> values) {
  if (values.empty()) return;
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const auto low = static_cast<double>(*least), high = static_cast<double>(*most);
  const std::size_t bars = low == high ? 1 : kMostBars;
  const double width = low == high ? 1 : (high - low) / static_cast<double>(bars);
  std::vector<double> limits(bars), counts(bars);
  double sum = 0, squares = 0;
  for (std::size_t b = 0; b < bars; ++b)
    limits[b] = b + 1 == bars ? high : low + width * static_cast<double>(b + 1);
  for (const std::int64_t n : values) {
    const auto x = static_cast<double>(n);
    counts[std::min(bars - 1, static_cast<std::size_t>((x - low) / width))] += 1;
    sum += x;
    squares += x * x;
  }
  std::string histogram;
  put_double(histogram, 1, low);
  put_double(histogram, 2, high);
  put_double(histogram, 3, static_cast<double>(values.size()));
  put_double(histogram, 4, sum);
  put_double(histogram, 5, squares);
  put_doubles(histogram, 6, limits);
  put_doubles(histogram, 7, counts);
  std::string content;
  put_bytes(content, 5, histogram);
  value(tag, content);
}

void EventSummary::image(std::string_view tag, int width, int height, std::string_view png) {
  constexpr std::int64_t kRgb = 3;
  std::string image;
  put_integer(image, 1, height);
  put_integer(image, 2, width);
  put_integer(image, 3, kRgb);
  put_bytes(image, 4, png);
  std::string content;
  put_bytes(content, 4, image);
  value(tag, content);
}

// A tensor of one string, which the metadata hands to the text plugin.
void EventSummary::text(std::string_view tag, std::string_view markdown) {
  constexpr std::int64_t kString = 7;
  std::string tensor, plugin, metadata, content;
  put_integer(tensor, 1, kString);
  put_bytes(tensor, 2, "");  // shape: a scalar
  put_bytes(tensor, 8, markdown);
  put_bytes(content, 8, tensor);
  put_bytes(plugin, 1, "text");
  put_bytes(metadata, 1, plugin);
  put_bytes(content, 9, metadata);
  value(tag, content);
}

struct EventFile::Impl {
  explicit Impl(const std::filesystem::path& folder)
      : file(new_path(folder), DurableFile::Mode::create) {}
  DurableFile file;
};

EventFile::EventFile(const std::filesystem::path& folder) : impl_(std::make_unique<Impl>(folder)) {
  std::string event;
  put_double(event, 1, unix_time());
  put_bytes(event, 3, kVersion);
  impl_->file.write(record_of(event));
}
EventFile::~EventFile() = default;

const std::filesystem::path& EventFile::path() const noexcept {
  return impl_->file.path();
}

void EventFile::session_start(std::int64_t first_step) {
  constexpr std::int64_t kStart = 1;
  std::string session, event = event_at(first_step);
  put_integer(session, 1, kStart);
  put_bytes(event, 7, session);
  impl_->file.write(record_of(event));
}

void EventFile::write(std::int64_t step, const EventSummary& summary) {
  std::string event = event_at(step);
  put_bytes(event, 5, summary.bytes());
  impl_->file.write(record_of(event));
}

void EventFile::finish() {
  impl_->file.finish();
}

}  // namespace moesaic
