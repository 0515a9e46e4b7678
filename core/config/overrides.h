#pragma once
#include <string>
#include <vector>

#include "core/config/node.h"

namespace moesaic::config {

/// Applies arguments of the form `a.b=c` and `a.b[0]=c` to the tree of the merged files. The value
/// is one line of YAML; its type comes from the key when the tree is read. Setting a key twice with
/// different values, a wrong form, and an index beyond the end of the list are problems.
void apply_overrides(Node& root,
                     const std::vector<std::string>& arguments,
                     std::vector<Problem>& problems);

}  // namespace moesaic::config
