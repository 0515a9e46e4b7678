#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace moesaic::apps::selftest {

struct LayoutsOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string layouts;  ///< "dp=2,ep=2;dp=4"; empty = all that fit the ranks
  int ranks = 0;        ///< threads of this process; 0 = the ranks of mpirun, 4 threads without it
  std::int64_t sample = 0;  ///< so many of the layouts, drawn; 0 = all
  std::uint64_t seed = 1;   ///< of the sample
  int steps = 3;
  bool json = false;
};

/// Trains the same steps on one rank and in every layout and compares (bounds.h): in f64 unless an override says
/// run.precision; then every layout takes the choices of the run on one rank. On the CPU unless an override says
/// run.device=cuda; then each of the ranks of mpirun has a GPU. Layouts of fewer ranks take the first ones. Returns the exit code: 0 = all agree.
int run_layouts(const LayoutsOptions& options, std::ostream& out);

}  // namespace moesaic::apps::selftest
