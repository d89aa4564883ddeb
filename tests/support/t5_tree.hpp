#pragma once

#include "tests/support/partition_models.hpp"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <stdexcept>

namespace smp::test {

/// T5-11B at sequence length 512: memory with activations, fitted times.
inline model_info load_t5() {
  auto root = std::getenv("SMP_SOURCE_DIR");
  if (root == nullptr)
    throw std::runtime_error("SMP_SOURCE_DIR is not set; ctest sets it");
  std::ifstream file{std::string{root} + "/tests/data/t5_11b_tree.json"};
  auto json = nlohmann::json::parse(file);
  std::vector<module_line> lines;
  for (auto& x : json.at("nodes"))
    lines.push_back({x.at("name"), x.at("children"), x.at("memory"),
                     x.at("compute"), x.at("params")});
  return make_model(lines);
}

} // namespace smp::test
