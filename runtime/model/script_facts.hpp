#pragma once

#include "runtime/model/module_facts.hpp"
#include "runtime/model/script_walk.hpp"

namespace smp {

class script_code;

/// What to ask of a TorchScript module, which it keeps alive.
/// @param code of its model
std::shared_ptr<module_facts> facts_of(script_object x,
                                       const script_code& code);

} // namespace smp
