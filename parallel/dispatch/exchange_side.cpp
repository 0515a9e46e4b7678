// Exchanges beside other work, and what they take.
#include <utility>

#include "parallel/dispatch/exchange_impl.h"

namespace moesaic {
namespace {

Traffic sent_so_far(const ExchangeStatistics& statistics) {
  Traffic sum = statistics.rows;
  sum += statistics.choices;
  return sum;
}

}  // namespace

ExpertExchange::Impl::Measured::Measured(Impl& self,
                                         const ExchangePlan::Impl& plan,
                                         ExchangeWay way,
                                         Backend& backend)
    : self_(self),
      label_(plan.label),
      way_(way),
      stream_(stream_of(backend)),
      is_outermost_(self.calls++ == 0 && self.meter != nullptr && self.meter->is_on()) {
  if (!is_outermost_) return;
  before_ = sent_so_far(self_.statistics);
  span_ = self_.meter->start(label_, way_, stream_, true, &backend != self_.side);
}

ExpertExchange::Impl::Measured::~Measured() {
  --self_.calls;
  if (!is_outermost_) return;
  self_.meter->finish(span_, stream_);
  Traffic sent = sent_so_far(self_.statistics);
  for (std::size_t i = 0; i < sent.bytes.size(); ++i)
    sent.bytes[i] -= before_.bytes[i];
  self_.meter->add(label_, way_, sent);
}

void ExpertExchange::set_meter(ExchangeMeter* meter) {
  impl_->meter = meter;
}

void ExpertExchange::set_side(Backend* side) {
  impl_->side = side;
  impl_->is_away = false;
  impl_->landings.clear();
  if (side == nullptr) return;
  const Stream& stream = stream_of(*side);
  const Device device = stream.mode() == Stream::Mode::dry ? kCpu : stream.device();
  impl_->departed.emplace(device);
  impl_->arrived.emplace(device);
  for (int i = 0; i < chunks(); ++i)
    impl_->landings.push_back({Event(device)});
}

bool ExpertExchange::has_side() const noexcept {
  return impl_->side != nullptr;
}

Backend& ExpertExchange::depart(Backend& main) {
  if (impl_->side == nullptr) return main;
  stream_of(main).record(*impl_->departed);
  stream_of(*impl_->side).wait(*impl_->departed);
  impl_->is_away = true;
  return *impl_->side;
}

void ExpertExchange::Impl::wait(const ExchangePlan::Impl& plan,
                                ExchangeWay way,
                                Stream& stream,
                                const Event& event) {
  const std::size_t span =
      meter == nullptr ? 0 : meter->start(plan.label, way, stream, false, true);
  stream.wait(event);
  if (span > 0) meter->finish(span, stream);
}

void ExpertExchange::note(int number) {
  if (impl_->side == nullptr) return;
  impl_->is_away = false;
  Impl::Landing& landing = impl_->landings.at(static_cast<std::size_t>(number));
  stream_of(*impl_->side).record(landing.event);
  landing.is_awaited = true;
}

void ExpertExchange::arrive(const ExchangePlan& plan, ExchangeWay way, Backend& main, int number) {
  if (impl_->side == nullptr) return;
  Impl::Landing& landing = impl_->landings.at(static_cast<std::size_t>(number));
  if (std::exchange(landing.is_awaited, false))
    impl_->wait(*plan.impl_, way, stream_of(main), landing.event);
}

void ExpertExchange::arrive(const ExchangePlan& plan, ExchangeWay way, Backend& main) {
  if (!std::exchange(impl_->is_away, false)) return;
  stream_of(*impl_->side).record(*impl_->arrived);
  impl_->wait(*plan.impl_, way, stream_of(main), *impl_->arrived);
}

}  // namespace moesaic
