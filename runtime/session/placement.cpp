#include "runtime/session/placement.hpp"

#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string_view>
#include <vector>

namespace smp {

namespace {

/// "'blocks' has 0, 1, 2", for the last part of the name that is right.
std::string nearest(const walked_model& model, std::string name) {
  std::optional<uint32_t> parent;
  while (!parent) {
    auto dot = name.rfind('.');
    name.resize(dot == std::string::npos ? 0 : dot);
    parent = model.find_module(name);
  }
  std::vector<std::string_view> children;
  for (auto child : model.modules[*parent].children) {
    std::string_view x = model.modules[child].names.front();
    children.push_back(x.substr(x.rfind('.') + 1));
  }
  auto where = name.empty() ? "the model" : "'" + name + "'";
  return children.empty()
           ? where + " has no modules in it"
           : fmt::format("{} has {}", where, fmt::join(children, ", "));
}

} // namespace

void place_by_name(const distributed_model_base& model,
                   const std::map<std::string, uint64_t>& devices) {
  auto& walked = model.state().model();
  for (auto& [name, device] : devices) {
    auto found = walked.find_module(name);
    if (!found)
      throw error{error_code::config,
                  fmt::format("smp.manual_partition: the model has no module "
                              "'{}'; {}",
                              name, nearest(walked, name))};
    session::current()
      .internals()
      .marks()
      .pins[walked.modules[*found].identity()]
      = static_cast<uint32_t>(device);
  }
}

} // namespace smp
