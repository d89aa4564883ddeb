#pragma once

#include "actors/protocol/request.hpp"
#include "transport/ids.hpp"

#include <vector>

namespace smp {

class model_map;

/// @returns the modules that microbatches pass in their order (R19) among
/// those that a request of another rank, or the step body, enters. Any thread.
std::vector<module_id> entered_modules(const model_map& map, const request& x);

} // namespace smp
