// Must not pass: without launch bounds the assembler ignores setmaxnreg.
#include "kernels/cuda/ptx.cuh"

namespace {

__global__ void no_bounds(float* out) {
  moesaic::cuda::set_max_registers_down<40>();
  out[threadIdx.x] = 1;
}

}  // namespace

void launch_no_bounds(float* out) {
  no_bounds<<<1, 128>>>(out);
}
