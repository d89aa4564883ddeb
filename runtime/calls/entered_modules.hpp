#pragma once

#include "actors/protocol/request.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

class model_map;

/// @returns those modules entered by a request of another rank, or by the step
/// body, that microbatches pass in order (R19). Callable from any thread.
std::vector<module_id> entered_modules(const model_map& map, const request& x);

} // namespace smp
