#include "runtime/placement/model_description.hpp"

#include "runtime/model/hook.hpp"

#include <string>
#include <utility>

namespace smp {

namespace {

/// Why the calls of a module cannot be intercepted, with the cure (R20).
std::string not_interceptable(const walked_module& x) {
  if (x.intercepted || x.container || x.names.front().empty())
    return {};
  auto type = x.type;
  if (type.ends_with("Impl"))
    type.resize(type.size() - 4);
  return "its calls cannot be seen; declare it as smp::submodule<" + type
         + "> or put it into a Sequential";
}

} // namespace

model_info describe(const walked_model& model,
                    const std::map<const void*, uint32_t>& pins,
                    const module_order& order) {
  model_info result;
  for (auto& m : model.modules) {
    module_info x;
    x.path = m.names.front();
    x.type = m.type;
    for (auto child : m.children)
      x.children.push_back(module_id{child});
    for (auto i : m.tensors) {
      auto& t = model.tensors[i];
      auto info = tensor_info{i, t.names.front(),
                              static_cast<uint64_t>(t.tensor.numel())};
      (t.is_buffer ? x.buffers : x.parameters).push_back(info);
    }
    x.not_interceptable = not_interceptable(m);
    x.ordered = order.reason(static_cast<uint32_t>(result.size()));
    x.container = m.container;
    x.sequential = m.sequential;
    for (auto* hook : m.hooks)
      if (hook->pinned)
        x.pinned_device = hook->pinned;
    if (auto i = pins.find(m.identity()); i != pins.end())
      x.pinned_device = i->second;
    result.push_back(std::move(x));
  }
  return result;
}

double element_bytes(const walked_model& model) {
  double bytes = 0;
  double elements = 0;
  for (auto& x : model.tensors)
    if (!x.is_buffer && x.tensor.defined()) {
      bytes += static_cast<double>(x.tensor.nbytes());
      elements += static_cast<double>(x.tensor.numel());
    }
  return elements > 0 ? bytes / elements : sizeof(float);
}

} // namespace smp
