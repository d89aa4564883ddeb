#include "tests/support/torch/numbers.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/catch.hpp"

#include <fmt/format.h>
#include <torch/utils.h>

#include <set>

namespace smp::test {

numbers all_of(const std::filesystem::path& file) {
  auto tensors = read_safetensors(file.string()).tensors;
  return {tensors.begin(), tensors.end()};
}

std::vector<std::string> differences(const numbers& got, const numbers& wanted,
                                     bool gradients, closeness allowed) {
  std::vector<std::string> result;
  std::set<std::string> names;
  for (auto xs : {&got, &wanted})
    for (auto& [name, x] : *xs)
      names.insert(name);
  for (auto& name : names) {
    auto a = got.find(name), b = wanted.find(name);
    if ((a == got.end() || b == wanted.end()) && !gradients) {
      result.push_back(name
                       + (a == got.end() ? " is missing" : " is too much"));
      continue;
    }
    auto x = a == got.end() ? torch::zeros_like(b->second) : a->second;
    auto y = b == wanted.end() ? torch::zeros_like(x) : b->second;
    if (x.sizes() != y.sizes() || x.dtype() != y.dtype()) {
      result.push_back(name + " has another shape or type");
      continue;
    }
    if (y.numel() == 0)
      continue;
    x = x.to(torch::kDouble);
    y = y.to(torch::kDouble);
    auto distance = (x - y).abs().max().item<double>();
    if (!(distance
          <= allowed.share * y.abs().max().item<double>() + allowed.least))
      result.push_back(fmt::format("{} differs by {}", name, distance));
  }
  return result;
}

void check_near(const numbers& mine, const numbers& expected,
                closeness allowed) {
  CHECK(differences(mine, expected, false, allowed)
        == std::vector<std::string>{});
}

} // namespace smp::test
