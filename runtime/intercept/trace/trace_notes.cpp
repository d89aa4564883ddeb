#include "runtime/intercept/trace/trace_notes.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/intercept/trace/tracer.hpp"
#include "runtime/model/module_type.hpp"
#include "runtime/model/module_walk.hpp"

#include <torch/nn/module.h>

#include <algorithm>

namespace smp {

void tracer::note_outside_call(const torch::nn::Module& x) {
  auto trained = [&](const at::Tensor& y) {
    return y.defined() && y.requires_grad() && model_.find(y) < 0;
  };
  auto type = type_for_user(x.name());
  if (model_.module_index.contains(dynamic_cast<const void*>(&x))
      || std::ranges::none_of(x.parameters(), trained)
      || !outside_.insert(type).second)
    return;
  print_stderr(
    "smp: the step calls a {} that is not part of the model, so smp "
    "does not train its parameters: register_module, in the module "
    "that has it, adds it\n",
    type);
}

void tracer::note_unsendable(const error& why) {
  if (auto from = caller(); from && counts())
    result_.modules[stack_.back().module.value].unsendable.emplace(*from,
                                                                   why.what());
}

void note_unsendable(const error& why) {
  if (auto* trace = tracer::current())
    trace->note_unsendable(why);
}

void note_outside_call(const torch::nn::Module& x) {
  if (auto* trace = tracer::current())
    trace->note_outside_call(x);
}

} // namespace smp
