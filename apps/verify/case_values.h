#pragma once
#include <vector>

#include "core/base/tensor.h"

namespace moesaic::verify {

/// Writes values to host memory as elements of `dtype`, rounded. In = double | std::int64_t.
template <class In>
void write_values(DType dtype, std::byte* to, const std::vector<In>& values);
/// All elements of a tensor in host memory. Out = double | std::int64_t.
template <class Out>
std::vector<Out> read_values(const ConstTensorView& host);

}  // namespace moesaic::verify
