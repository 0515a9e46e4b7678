#include <nvtx3/nvToolsExt.h>

#include "kernels/cuda_handles.h"
#include "kernels/part_scope.h"

namespace moesaic::cuda {
namespace {

class NvtxObserver final : public PartObserver {
 public:
  void begin(const char* op) override { nvtxRangePushA(op); }
  void end(const char*, const OpCost&) override { nvtxRangePop(); }
  void push(const std::string& part) override { nvtxRangePushA(part.c_str()); }
  void pop() override { nvtxRangePop(); }
};

}  // namespace

std::unique_ptr<OpObserver> create_nvtx_observer() {
  return std::make_unique<NvtxObserver>();
}

}  // namespace moesaic::cuda
