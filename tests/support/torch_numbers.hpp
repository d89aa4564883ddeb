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

/// R35. @returns what differs, one line each
/// @param gradients a missing one counts as one of zeros
std::vector<std::string> differences(const numbers& got, const numbers& wanted,
                                     bool gradients);

} // namespace smp::test
