#pragma once

#include "transport/stacks/process_stacks.hpp"

#include <cstdint>
#include <map>
#include <set>

namespace smp {

/// Names places in the code of this process. Reads the files of its libraries,
/// which name static functions, too, and takes no lock, as dladdr does: a
/// thread that is stuck in dlopen holds that one.
std::map<uintptr_t, stack_frame>
frames_at(const std::set<uintptr_t>& addresses);

} // namespace smp
