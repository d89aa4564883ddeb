#include "runtime/session/placement.hpp"

#include "runtime/session/rank_runtime.hpp"
#include "runtime/sharing/sharing.hpp"
#include "runtime/step/model_state.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

namespace smp {

void place_by_name(const distributed_model_base& model,
                   const std::map<std::string, uint64_t>& devices) {
  auto& walked = model.state().model();
  for (auto& [name, device] : devices) {
    auto found = walked.find_module(name);
    if (!found)
      throw error{error_code::config,
                  fmt::format("smp.manual_partition: the model has no module "
                              "'{}'; {}",
                              name, walked.existing_near(name))};
    session::current()
      .internals()
      .marks()
      .pins[walked.modules[*found].identity()]
      = static_cast<uint32_t>(device);
  }
}

void place_in_turn(const distributed_model_base& model) {
  auto& rank = session::current().internals();
  auto& walked = model.state().model();
  auto& modules = walked.modules;
  auto ranks = static_cast<uint32_t>(rank.pipeline().size());
  // A module inside of a shared module goes where that goes.
  std::vector<bool> inside(modules.size());
  for (auto& x : decide_sharing(walked, rank.marks().sharing,
                                sharing_wanted(rank.config()))
                   .shared)
    for (auto below : walked.subtree(static_cast<uint32_t>(x.id.value)))
      inside[below] = below != x.id.value;
  std::vector<uint32_t> devices(modules.size(), 0);
  for (uint32_t i = 1; i < devices.size(); ++i)
    devices[i] = !inside[i] && (modules[i].intercepted || modules[i].container)
                   ? i % ranks
                   : devices[modules[i].parent];
  // Repeated, for modules that are tied to several others.
  for (auto changed = true; std::exchange(changed, false);)
    for (auto& t : walked.tensors)
      for (auto m : t.modules) {
        auto &a = devices[m], &b = devices[t.modules.front()];
        changed = changed || a != b;
        a = b = std::min(a, b);
      }
  for (uint32_t i = 0; i < devices.size(); ++i)
    rank.marks().pins[modules[i].identity()] = devices[i];
}

} // namespace smp
