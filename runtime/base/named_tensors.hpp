#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace smp {

/// Named tensors, in the order of a file or model.
using named_tensors = std::vector<std::pair<std::string, at::Tensor>>;

} // namespace smp
