#include "runtime/sharing/sharing_explanations.hpp"

#include "partition/short_type.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/sharing/sharing_request_lookup.hpp"
#include "tp/distributions.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>

namespace smp {

namespace {

/// The modules that are shared or cut, with the modules inside of them.
std::set<uint32_t> modules_in_parts(const walked_model& model,
                                    const sharing_decision& x) {
  std::set<uint32_t> result;
  for (auto& shared : x.shared)
    for (auto i : model.subtree(static_cast<uint32_t>(shared.id.value)))
      result.insert(i);
  for (auto& cut : x.cut)
    result.insert(model.tensors[cut.tensor].modules.front());
  return result;
}

bool has_parameters(const walked_model& model, uint32_t module) {
  return std::ranges::any_of(model.modules[module].tensors, [&](auto i) {
    return !model.tensors[i].is_buffer;
  });
}

bool made_in_scope(const walked_module& x) {
  return std::ranges::any_of(x.hooks,
                             [](auto* y) { return y->sharing.has_value(); });
}

std::string verdict(const walked_module& x, bool parameters) {
  auto type = short_type(x.type);
  if (!parameters)
    return type
           + " not shared, as it has no parameters of which each could hold a "
             "part; do not name it";
  return fmt::format(
    "{} not shared, as there is no distributed implementation "
    "of it; {}",
    type,
    x.script
      ? "smp::tp_register can take it for one of " + known_distributions()
      : "smp::tp_register gives it one");
}

} // namespace

void explain_unknown(const walked_model& model,
                     const std::map<const void*, sharing_mark>& marked,
                     const sharing_request& x, sharing_decision& to) {
  sharing_request_lookup wishes{model, marked, x.patterns};
  auto parts = modules_in_parts(model, to);
  for (uint32_t i = 0; i < model.modules.size(); ++i) {
    if (parts.contains(i) || !wishes.wanted(i))
      continue;
    auto below = model.subtree(i);
    auto parameters = [&](uint32_t j) { return has_parameters(model, j); };
    // A module without parameters matters only if it was requested itself.
    auto without = wishes.named(i) && !made_in_scope(model.modules[i])
                   && std::ranges::none_of(below, parameters);
    if (!parameters(i) && !without)
      continue;
    auto is_part = [&](uint32_t j) { return parts.contains(j); };
    auto native = native_of(model, i);
    if (std::ranges::none_of(below, is_part) && !(native && native->how))
      to.remarks.add(verdict(model.modules[i], !without),
                     model.modules[i].names.front());
  }
}

std::string warning_of_nothing_shared(const sharing_request& x,
                                      const sharing_decision& found) {
  if (x.peers == 1 || !found.shared.empty() || !found.cut.empty())
    return {};
  return fmt::format(
    "nothing is shared, so the {} ranks of each tensor-parallel group train as "
    "replicas, each with a whole model; {}",
    x.peers,
    found.remarks.lines().empty()
      ? "name modules in tensor_parallel.modules, or leave "
        "smp.tensor_parallel_degree out"
      : "the reasons are below");
}

} // namespace smp
