#pragma once
#include <iosfwd>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/config/load.h"

namespace moesaic::bench {

struct StepOptions {
  int steps = 10;
  bool json = false;
};
/// Trains on random tokens in this process alone: a few steps to warm up, `steps` timed ones, then as many with every op
/// timed. Prints rates and where the time goes.
int bench_step(const config::LoadedConfig& loaded, const StepOptions& options, std::ostream& out);

struct OpsOptions {
  std::string only;  ///< part of an op's name; empty = all
  DType dtype = DType::f32;
  int num_threads = 1;
  bool json = false;
};
/// Times every op on shapes of small models, on random data.
int bench_ops(const OpsOptions& options, std::ostream& out);

}  // namespace moesaic::bench
