#include "kernels/ops/op_list.h"

namespace moesaic {
namespace {

template <class... Ops>
std::vector<std::string> names(OpList<Ops...>) {
  return {Ops::kName...};
}
template <class... Ops>
std::vector<std::string> names_without_cuda(OpList<Ops...>) {
  std::vector<std::string> missing;
  ((HasCuda<Ops> ? void() : missing.emplace_back(Ops::kName)), ...);
  return missing;
}

}  // namespace

std::vector<std::string> op_names() { return names(AllOps{}); }
std::vector<std::string> missing_cuda_ops() { return names_without_cuda(AllOps{}); }

}  // namespace moesaic
