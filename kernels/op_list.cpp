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
  const auto add = [&](bool has_cuda, const char* name) {
    if (!has_cuda) missing.emplace_back(name);
  };
  (add(HasCuda<Ops>, Ops::kName), ...);
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
