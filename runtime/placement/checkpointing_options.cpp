#include "runtime/placement/checkpointing_options.hpp"

#include "runtime/config/session_config.hpp"
#include "transport/error.hpp"

namespace smp {

void check_checkpointing(const activation_checkpointing& x, bool sequential) {
  if (!checkpointed_together(x.strategy))
    throw config_error("activation checkpointing: the strategy is \""
                       + x.strategy
                       + "\"; write \"each\", \"contiguous\" or \"group_2\", "
                         "\"group_3\", ...");
  if (!sequential && x.strategy != "each")
    throw config_error("activation checkpointing: strategy \"" + x.strategy
                       + "\" is for the children of a Sequential");
  if (!sequential && x.pack_args_as_tuple)
    throw config_error(
      "activation checkpointing: pack_args_as_tuple is for a Sequential");
}

} // namespace smp
