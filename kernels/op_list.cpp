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
  const auto add = [&missing](const char* op, bool has_cuda) {
    if (!has_cuda) missing.emplace_back(op);
  };
  (add(Ops::kName, HasCuda<Ops>), ...);
  return missing;
}

}  // namespace

std::vector<std::string> op_names() {
  return names(AllOps{});
}
std::vector<std::string> missing_cuda_ops() {
  return names_without_cuda(AllOps{});
}

}  // namespace moesaic
