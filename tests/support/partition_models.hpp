#pragma once

// Models for tests of partition/, written as short tables.

#include "partition/module_tree.hpp"

#include <map>
#include <random>

namespace smp::test {

/// One line of a table; the first line is the root.
struct module_line {
  std::string path;
  std::vector<uint64_t> children;
  double memory = 0;
  double compute = 0;
  std::vector<std::string> parameters = {};
};

inline model_info make_model(const std::vector<module_line>& lines) {
  model_info result;
  std::map<std::string, uint64_t> ids;
  for (auto& x : lines) {
    auto& y = result.emplace_back();
    y.path = x.path;
    y.type = "module";
    for (auto child : x.children)
      y.children.push_back(module_id{child});
    for (auto& name : x.parameters)
      y.parameters.push_back(
        {ids.emplace(name, ids.size()).first->second, name, 0});
    y.activations = x.memory;
    y.compute = x.compute;
  }
  return result;
}

/// A random tree in breadth-first order of `size` nodes with integer costs of
/// at most `largest`, some of them 0.
inline model_info random_model(std::mt19937_64& engine, uint64_t size,
                               uint64_t largest) {
  auto draw = [&engine](uint64_t n) { return engine() % n; };
  model_info result(size);
  for (uint64_t i = 0; i < size; ++i) {
    auto& x = result[i];
    x.path = i == 0 ? "" : "m" + std::to_string(i);
    x.type = "module";
    x.activations = static_cast<double>(draw(4) == 0 ? 0 : draw(largest + 1));
    x.compute = static_cast<double>(draw(4) == 0 ? 0 : draw(largest + 1));
    if (i > 0)
      result[draw(i)].children.push_back(module_id{i});
  }
  return result;
}

} // namespace smp::test
