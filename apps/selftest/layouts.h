#pragma once
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "parallel/mesh.h"

namespace moesaic::apps::selftest {

/// A layout to try. dp is always given.
struct Layout {
  MeshConfig mesh;
  int ranks() const { return mesh.pp * mesh.dp * mesh.cp * mesh.tp; }
  /// "dp2 ep2", the axes of more than one rank; "one rank".
  std::string name() const;
};

/// "dp=2,ep=2;dp=4": layouts behind semicolons. Throws UsageError with what is wrong.
std::vector<Layout> parse_layouts(const std::string& text);
/// All layouts of 2 … max_ranks ranks that the configuration can be trained in, fewest ranks first.
std::vector<Layout> all_layouts(const config::Config& config, int max_ranks);
/// A sample of `count` of them, drawn with `seed`, in their order.
std::vector<Layout> sample(const std::vector<Layout>& layouts,
                           std::size_t count,
                           std::uint64_t seed);
/// Why the configuration cannot be trained in it; empty when it can.
std::string problem(const config::Config& config, const Layout& layout);
/// The same configuration in that layout.
config::Config in_layout(config::Config config, const Layout& layout);

}  // namespace moesaic::apps::selftest
