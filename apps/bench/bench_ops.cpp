#include "apps/bench/bench.h"
namespace moesaic::bench {
int bench_ops(const OpsOptions&, std::ostream&) { return 0; }
}
