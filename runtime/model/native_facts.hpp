#pragma once

#include "runtime/model/module_facts.hpp"

namespace smp {

/// What to ask of a torch::nn module: itself, if it stands for one of another
/// language. Keeps it alive, unless no shared pointer holds it.
std::shared_ptr<module_facts> facts_of(torch::nn::Module& x);

} // namespace smp
