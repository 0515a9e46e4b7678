#pragma once
#include <cstddef>

#include "core/nn/parameter_store.h"

namespace moesaic {

/// Of a position in ParameterStore::params().
inline ParamId param_id(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
inline StorageId storage_id(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}

}  // namespace moesaic
