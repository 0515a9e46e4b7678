#include "parallel/dispatch/method.h"

#include <fmt/format.h>

namespace moesaic {

const char* name(ExchangeMethod method) noexcept {
  switch (method) {
    case ExchangeMethod::pair:
      return "pair";
    case ExchangeMethod::flat:
      return "flat";
    case ExchangeMethod::inter_first:
      return "inter_first";
    case ExchangeMethod::intra_first:
      return "intra_first";
    case ExchangeMethod::intra_first_3:
      return "intra_first_3";
    case ExchangeMethod::dense:
      return "dense";
    case ExchangeMethod::hdense:
      break;
  }
  return "hdense";
}

ExchangeMethod exchange_method_from_name(const std::string& text) {
  std::string names;
  for (const ExchangeMethod m : kExchangeMethods) {
    if (text == name(m)) return m;
    names += std::string(names.empty() ? "" : ", ") + name(m);
  }
  throw UsageError(fmt::format("no exchange method '{}'; there are {}", text, names));
}

HopList hops_of(ExchangeMethod method) noexcept {
  switch (method) {
    case ExchangeMethod::pair:
    case ExchangeMethod::flat:
    case ExchangeMethod::dense:
      return {{HopKind::owner}, 1};
    case ExchangeMethod::intra_first:
      return {{HopKind::local, HopKind::node}, 2};
    case ExchangeMethod::intra_first_3:
      return {{HopKind::proxy, HopKind::node, HopKind::local}, 3};
    case ExchangeMethod::inter_first:
    case ExchangeMethod::hdense:
      break;
  }
  return {{HopKind::node, HopKind::local}, 2};
}

const char* name(Link link) noexcept {
  return link == Link::self ? "self" : link == Link::node ? "node" : "network";
}

}  // namespace moesaic
