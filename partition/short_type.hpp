#pragma once

#include <string>

namespace smp {

/// @returns the class name without namespaces, modules and LibTorch's suffix:
/// "Conv2d" of "torch::nn::Conv2dImpl" and of "torch.nn.modules.conv.Conv2d"
std::string short_type(std::string x);

} // namespace smp
