#include "core/config/overrides.h"

#include <cctype>
#include <map>
#include <utility>

#include <fmt/format.h>

namespace moesaic::config {
namespace {

/// One step of a path: the entry `name`, then the items `indices` of it.
struct Step {
  std::string name;
  std::vector<std::size_t> indices;
};

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
}

/// `[12][3]` starting at text[i]; moves i behind it. At most six figures: larger lists do not fit
/// into a file.
bool parse_indices(const std::string& text, std::size_t& i, std::vector<std::size_t>& indices) {
  while (i < text.size() && text[i] == '[') {
    const std::size_t end = text.find(']', i);
    if (end == std::string::npos || end == i + 1 || end > i + 7) return false;
    std::size_t value = 0;
    for (++i; i < end; ++i) {
      if (text[i] < '0' || text[i] > '9') return false;
      value = value * 10 + static_cast<std::size_t>(text[i] - '0');
    }
    indices.push_back(value);
    ++i;
  }
  return true;
}

bool parse_path(const std::string& text, std::vector<Step>& steps) {
  std::size_t i = 0;
  while (true) {
    Step step;
    while (i < text.size() && is_word(text[i]))
      step.name += text[i++];
    if (step.name.empty() || !parse_indices(text, i, step.indices)) return false;
    steps.push_back(std::move(step));
    if (i == text.size()) return steps.size() <= kMaxYamlDepth;
    if (text[i++] != '.') return false;
  }
}

/// All positions of an override are "command line".
void mark(Node& node) {
  node.at = {kCommandLine, 0, 0};
  node.key_at = node.at;
  for (Node& child : node.children)
    mark(child);
}

Node parse_value(const std::string& key, const std::string& text, std::vector<Problem>& problems) {
  std::vector<Problem> found;
  Node node = parse_yaml(text, kCommandLine, found);
  for (const Problem& problem : found) {
    problems.push_back(
        {kCommandLine,
         0,
         0,
         key,
         fmt::format("found {}: {}; quote a text with special characters: {}='\"…\"'",
                     text,
                     problem.message,
                     key)});
  }
  mark(node);
  return node;
}

using Leaves = std::map<std::string, std::string>;

/// The values below `node` as text, to see whether two arguments disagree.
void collect_leaves(const Node& node, const std::string& path, Leaves& leaves) {
  if (node.kind == Node::Kind::scalar)
    leaves[path] = (node.quoted ? "\"" : "") + node.text;
  else if (node.children.empty() && node.kind != Node::Kind::list)
    leaves[path] = node.kind == Node::Kind::map ? "{}" : "null";
  // The length too, so that [a] disagrees with [a, b].
  if (node.kind == Node::Kind::list) leaves[path + "[]"] = fmt::format("{}", node.children.size());
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    const Node& child = node.children[i];
    collect_leaves(
        child,
        node.kind == Node::Kind::map ? path + "." + child.key : fmt::format("{}[{}]", path, i),
        leaves);
  }
}

bool is_below(const std::string& key, const std::string& group) {
  return key.size() > group.size() && key.starts_with(group) &&
         (key[group.size()] == '.' || key[group.size()] == '[');
}

/// Adds the leaves of one argument to those seen; false if an earlier argument set one of them
/// otherwise.
bool agrees(Leaves& seen, const Leaves& leaves) {
  bool fine = true;
  for (const auto& [key, value] : leaves) {
    for (const auto& [other, before] : seen) {
      if (other == key ? before != value : is_below(other, key) || is_below(key, other))
        fine = false;
    }
  }
  seen.insert(leaves.begin(), leaves.end());
  return fine;
}

Node& child_of(Node& node, const std::string& name) {
  if (node.kind != Node::Kind::map) {
    Node map;
    map.kind = Node::Kind::map;
    map.at = {kCommandLine, 0, 0};
    map.key = node.key;
    map.key_at = node.key_at;
    node = std::move(map);
  }
  if (Node* present = node.find(name)) return *present;
  Node& entry = node.children.emplace_back();
  entry.key = name;
  mark(entry);
  return entry;
}

/// The item `index` of a list; one past the end appends. nullptr if it is beyond that.
Node* item_of(Node& node, std::size_t index) {
  if (node.kind == Node::Kind::scalar) {  // a single value that stands for a list of one
    Node list;
    list.kind = Node::Kind::list;
    list.at = node.at;
    list.key = std::exchange(node.key, "");
    list.key_at = node.key_at;
    list.children.push_back(std::move(node));
    node = std::move(list);
  }
  if (node.kind == Node::Kind::null) node.kind = Node::Kind::list;
  if (node.kind != Node::Kind::list || index > node.children.size()) return nullptr;
  if (index == node.children.size()) mark(node.children.emplace_back());
  return &node.children[index];
}

void apply(Node& root,
           const std::string& key,
           const std::vector<Step>& steps,
           Node value,
           std::vector<Problem>& problems) {
  Node* at = &root;
  for (const Step& step : steps) {
    at = &child_of(*at, step.name);
    for (const std::size_t index : step.indices) {
      const std::size_t size =
          at->kind == Node::Kind::list ? at->children.size() : at->kind == Node::Kind::scalar;
      Node* item = item_of(*at, index);
      if (!item) {
        problems.push_back(
            {kCommandLine,
             0,
             0,
             key,
             fmt::format("the list has {} entries; allowed: an index from 0 to {} (which appends)",
                         size,
                         size)});
        return;
      }
      at = item;
    }
  }
  value.key = at->key;
  merge(*at, std::move(value));
}

}  // namespace

void apply_overrides(Node& root,
                     const std::vector<std::string>& arguments,
                     std::vector<Problem>& problems) {
  Leaves seen;
  for (const std::string& argument : arguments) {
    const std::size_t equals = argument.find('=');
    const std::string key = argument.substr(0, equals);
    std::vector<Step> steps;
    if (equals == std::string::npos || !parse_path(key, steps)) {
      problems.push_back(
          {kCommandLine,
           0,
           0,
           "",
           fmt::format("'{}' is not of the form section.key=value, such as train.steps=100",
                       argument)});
      continue;
    }
    if (steps[0].name == "base") {
      problems.push_back({kCommandLine, 0, 0, key, "can only be set in a file"});
      continue;
    }
    Node value = parse_value(key, argument.substr(equals + 1), problems);
    Leaves leaves;
    collect_leaves(value, key, leaves);
    if (!agrees(seen, leaves))
      problems.push_back(
          {kCommandLine, 0, 0, key, "set twice on the command line, with different values"});
    else
      apply(root, key, steps, std::move(value), problems);
  }
}

}  // namespace moesaic::config
