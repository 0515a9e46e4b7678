#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "memory/stream.h"
#include "parallel/dispatch/node_grid.h"

namespace moesaic {

/// The two directions of an exchange: with everything that goes to the experts, and back.
enum class ExchangeWay : std::uint8_t { dispatch, combine };

/// What the exchanges of one plan's label took, on this rank.
struct ExchangeUse {
  struct Way {
    double seconds = 0;              ///< of the stream that moved the rows, packing included
    double exposed = 0;              ///< of them, those that the experts' stream could not use
    std::int64_t bytes = 0;          ///< sent to other ranks
    std::int64_t network_bytes = 0;  ///< of them, to other nodes
  };
  std::string label;
  Way dispatch, combine;
  Way& of(ExchangeWay way) { return way == ExchangeWay::dispatch ? dispatch : combine; }
};

/// Measures exchanges by points in the order of streams. Reading them waits for nothing once the streams are idle.
class ExchangeMeter {
 public:
  explicit ExchangeMeter(Device device) : device_(device) {}

  /// Forgets everything and measures from here on.
  void begin();
  /// Measures no more, and tells what there was, in the order in which labels came first. The streams must be idle.
  std::vector<ExchangeUse> end();
  bool is_on() const noexcept { return is_on_; }

  /// From `start` to `finish` what `stream` does belongs to an exchange. `moves`: it moves rows; `exposed`: the experts
  /// wait for it. Returns a number for finish(); 0 while the meter is off.
  std::size_t start(
      const std::string& label, ExchangeWay way, Stream& stream, bool moves, bool exposed);
  void finish(std::size_t span, Stream& stream);
  void add(const std::string& label, ExchangeWay way, const Traffic& sent);

 private:
  struct Span {
    Timestamp from, to;
    std::size_t use = 0;
    ExchangeWay way = ExchangeWay::dispatch;
    bool moves = false, exposed = false;
  };
  std::size_t use_of(const std::string& label);

  Device device_;
  bool is_on_ = false;
  std::deque<Span> spans_;  // the first used_ of them are of this measurement
  std::size_t used_ = 0;
  std::vector<ExchangeUse> uses_;
  std::map<std::string, std::size_t> number_;
};

}  // namespace moesaic
