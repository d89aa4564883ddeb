#pragma once

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace smp::test {

using numbers = std::map<std::string, torch::Tensor>;

/// The tensors in a safetensors file.
numbers all_of(const std::filesystem::path& file);

/// How far numbers may be from others, by the largest of those.
struct closeness {
  double share = 1e-5; // R35
  double least = 1e-7;
};

/// @returns what differs, one line each
/// @param gradients a missing one counts as one of zeros
std::vector<std::string> differences(const numbers& got, const numbers& wanted,
                                     bool gradients, closeness allowed = {});

/// Checks that both have the same names, and under them the same numbers.
void check_near(const numbers& mine, const numbers& expected,
                closeness allowed = {});

} // namespace smp::test
