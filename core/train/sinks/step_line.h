#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/train/step_record.h"

namespace moesaic {

/// Makes the lines of the log:
///   step 120/2000 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 41.2k tok/s | 1.59 s | moe
///   max/mean 1.42 | eta 0:49:50
/// moe: the worst layer; a "dead N" follows when experts, summed over the layers, had no token.
/// Rates and seconds are means over the steps since the last line. The first step after a start is
/// slower than the rest: its line is marked (warm-up), and no mean contains it. The remaining time
/// is that of the mean of the last 100 steps.
class StepLines {
 public:
  struct Hardware {
    int devices = 0;             ///< 0: no figures per device
    double peak_flops = 0;       ///< of a device, per second; 0: no utilisation
    std::string device = "gpu";  ///< its name in the line
  };
  StepLines() = default;
  explicit StepLines(Hardware hardware) : hardware_(hardware) {}

  /// Every step, in order.
  void add(const StepRecord& record);
  /// The line of the last step added, without newline; InternalError when none was.
  std::string line();
  /// Further lines about the last step added, for those steps in which their values are there: the load of the experts and
  /// the bias of the routers ("moe …"), memory ("mem …"), and where the time of the steps since the last such line went
  /// ("time …"). Without "step N | " in front.
  std::vector<std::string> detail_lines();

 private:
  Hardware hardware_;
  StepRecord last_;
  std::int64_t added_ = 0;
  struct Sum {
    std::int64_t steps = 0, tokens = 0;
    double seconds = 0, flops = 0;
  };
  Sum since_line_;
  struct Parts {
    StepSeconds sum;
    std::int64_t steps = 0;
  };
  Parts since_details_;                 // without the warm-up
  std::vector<double> recent_seconds_;  // a ring
};

/// h:mm:ss, rounded to seconds; "0:00:00" for what is not positive, "-" for what is not finite or
/// above 10^6 hours.
std::string format_duration(double seconds);
/// Three digits and a unit: "950", "41.2k", "1.23M".
std::string format_count(double value);

}  // namespace moesaic
