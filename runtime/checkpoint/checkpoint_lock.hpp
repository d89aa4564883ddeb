#pragma once

#include <string>

namespace smp {

class model_state;

/// Keeps other runs out of a folder of checkpoints as long as the model lives:
/// each would remove what the other saves. Call it on one rank.
/// @throws error (config) as `folder_lock`
void lock_checkpoints(const std::string& dir, model_state& state);

} // namespace smp
