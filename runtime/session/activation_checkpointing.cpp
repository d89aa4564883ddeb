#include "runtime/session/activation_checkpointing.hpp"

#include "runtime/config/session_config.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "transport/error.hpp"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/sequential.h>

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

void set_activation_checkpointing(torch::nn::Module& x,
                                  const activation_checkpointing& how) {
  check_checkpointing(how,
                      dynamic_cast<torch::nn::SequentialImpl*>(&x) != nullptr);
  session::current()
    .internals()
    .marks()
    .checkpointing[dynamic_cast<const void*>(&x)]
    = how;
}

void set_activation_checkpointing(const torch::jit::Module& x,
                                  const activation_checkpointing& how) {
  check_checkpointing(how, true);
  session::current().internals().marks().checkpointing[x._ivalue().get()] = how;
}

} // namespace smp
