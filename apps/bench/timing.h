#pragma once
#include <string>
#include <vector>

namespace moesaic::bench {

/// Wall time, and processor time of all threads of this process: the second does not count what other processes take.
double seconds_now();
double processor_seconds_now();
double median(std::vector<double> values);

/// Operations per second of the BLAS library's float product of two 1024 x 1024 matrices on one thread, the median of
/// several calls, by processor time: what the other rates are measured against. Taken anew in every run, because it depends on the machine
/// and on who else uses it.
double library_sgemm_rate();

/// "12.3 us", "4.56 ms", "1.23 s".
std::string time_text(double seconds);

}  // namespace moesaic::bench
