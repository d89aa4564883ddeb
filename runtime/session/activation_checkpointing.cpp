#include "runtime/session/activation_checkpointing.hpp"

#include "runtime/model/module_facts.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/sequential.h>

namespace smp {

namespace {

void mark_as_checkpointed(const void* module,
                          const activation_checkpointing& how) {
  session::current()
    .internals()
    .marks_for(module, "smp::set_activation_checkpointing")
    .checkpointing[module]
    = how;
}

} // namespace

void set_activation_checkpointing(torch::nn::Module& x,
                                  const activation_checkpointing& how) {
  auto* foreign = dynamic_cast<foreign_module*>(&x);
  check_checkpointing(how,
                      dynamic_cast<torch::nn::SequentialImpl*>(&x) != nullptr
                        || (foreign != nullptr && foreign->is_sequential()));
  mark_as_checkpointed(dynamic_cast<const void*>(&x), how);
}

void set_activation_checkpointing(const torch::jit::Module& x,
                                  const activation_checkpointing& how) {
  check_checkpointing(how, true);
  mark_as_checkpointed(x._ivalue().get(), how);
}

} // namespace smp
