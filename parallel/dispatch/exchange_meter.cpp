#include "parallel/dispatch/exchange_meter.h"

#include <utility>

namespace moesaic {

void ExchangeMeter::begin() {
  is_on_ = true;
  used_ = 0;
  uses_.clear();
  number_.clear();
}

std::vector<ExchangeUse> ExchangeMeter::end() {
  is_on_ = false;
  for (std::size_t i = 0; i < used_; ++i) {
    const Span& span = spans_[i];
    const double seconds = seconds_between(span.from, span.to);
    ExchangeUse::Way& way = uses_[span.use].of(span.way);
    if (span.moves) way.seconds += seconds;
    if (span.exposed) way.exposed += seconds;
  }
  used_ = 0;
  return std::exchange(uses_, {});
}

std::size_t ExchangeMeter::start(
    const std::string& label, ExchangeWay way, Stream& stream, bool moves, bool exposed) {
  if (!is_on_ || stream.mode() == Stream::Mode::dry) return 0;
  if (used_ == spans_.size()) spans_.push_back({Timestamp(device_), Timestamp(device_)});
  Span& span = spans_[used_];
  span.use = use_of(label);
  span.way = way;
  span.moves = moves;
  span.exposed = exposed;
  stream.record(span.from);
  return ++used_;
}

void ExchangeMeter::finish(std::size_t span, Stream& stream) {
  if (span > 0) stream.record(spans_[span - 1].to);
}

void ExchangeMeter::add(const std::string& label, ExchangeWay way, const Traffic& sent) {
  if (!is_on_) return;
  ExchangeUse::Way& use = uses_[use_of(label)].of(way);
  const std::int64_t network = sent.bytes[static_cast<std::size_t>(Link::network)];
  use.network_bytes += network;
  use.bytes += network + sent.bytes[static_cast<std::size_t>(Link::node)];
}

std::size_t ExchangeMeter::use_of(const std::string& label) {
  const auto [at, is_new] = number_.emplace(label, uses_.size());
  if (is_new) uses_.push_back({.label = label, .dispatch = {}, .combine = {}});
  return at->second;
}

}  // namespace moesaic
