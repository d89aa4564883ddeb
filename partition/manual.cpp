#include "partition/manual.hpp"

#include "transport/error.hpp"

#include <algorithm>

namespace smp {

namespace {

std::string number(uint32_t x) {
  return std::to_string(x);
}

void check_device(const std::string& what, uint32_t x, uint32_t devices) {
  if (x >= devices)
    throw config_error(
      what + " is device " + number(x) + ", but smp.pipeline_parallel_degree = "
      + number(devices) + " has devices 0 to " + number(devices - 1));
}

class pin_finder {
public:
  pin_finder(const model_info& model, const module_tree& tree,
             const manual_options& options)
    : model_(model), tree_(tree), options_(options) {
    // nop
  }

  std::vector<std::optional<uint32_t>> run() {
    std::vector<std::optional<uint32_t>> result(tree_.size());
    for (size_t i = 0; i < tree_.size(); ++i) {
      if (auto module = pinned_module(tree_[i]))
        result[i] = model_[module->value].pinned_device;
      else if (i > 0)
        result[i] = result[tree_[i].parent];
      if (i == 0)
        check_root(result[0]);
      if (!result[i] && !options_.automatic)
        result[i] = options_.default_device;
      check_captives(tree_[i], i == 0 ? 0u : result[i]);
    }
    result[0] = 0;
    return result;
  }

private:
  /// What a module cannot leave, and why: "its parent: ..."
  std::string why_captive(module_id x) const {
    auto& m = model_[x.value];
    if (!m.part_of.empty())
      return "its parent: it is part of " + m.part_of;
    if (!m.not_interceptable.empty())
      return "its parent: " + m.not_interceptable;
    if (m.stays_with.empty())
      return {};
    auto& [caller, why] = *m.stays_with.begin();
    return describe_module(model_, caller) + ": " + why;
  }

  bool is_captive(module_id x) const {
    return x.value != 0 && !why_captive(x).empty();
  }

  std::string why_together(module_id x) const {
    for (auto& y : tree_.merges())
      if (y.module == x)
        return describe_reason(y);
    return "they are one node";
  }

  /// @returns the module that decides where its node goes.
  std::optional<module_id> pinned_module(const module_node& node) const {
    std::optional<module_id> result;
    for (auto x : node.modules) {
      auto pin = model_[x.value].pinned_device;
      if (!pin)
        continue;
      check_device("the partition of " + describe_module(model_, x), *pin,
                   options_.devices);
      if (is_captive(x))
        continue;
      if (!result)
        result = x;
      else if (model_[result->value].pinned_device != pin)
        throw config_error(describe_module(model_, x) + " is pinned to device "
                           + number(*pin) + " and "
                           + describe_module(model_, *result) + " to device "
                           + number(*model_[result->value].pinned_device)
                           + ", but they must be together: " + why_together(x));
    }
    return result;
  }

  void check_root(std::optional<uint32_t> pin) const {
    if (!pin || *pin == 0)
      return;
    auto x = *pinned_module(tree_[0]);
    auto text = describe_module(model_, x) + " is pinned to device "
                + number(*pin) + ", but the root runs where the step runs, on"
                                 " device 0";
    if (x.value != 0)
      text += ", and they must be together: " + why_together(x);
    throw config_error(std::move(text));
  }

  /// A module that cannot leave its parent, or caller, may only be pinned to
  /// where that is.
  void check_captives(const module_node& node,
                      std::optional<uint32_t> device) const {
    for (auto x : node.modules) {
      auto pin = model_[x.value].pinned_device;
      if (pin && is_captive(x) && pin != device)
        throw config_error(describe_module(model_, x) + " is pinned to device "
                           + number(*pin) + ", but stays with "
                           + why_captive(x));
    }
  }

  const model_info& model_;
  const module_tree& tree_;
  const manual_options& options_;
};

} // namespace

std::vector<std::optional<uint32_t>> fixed_devices(const model_info& model,
                                                   const module_tree& tree,
                                                   const manual_options& x) {
  if (x.devices == 0)
    throw config_error("smp.pipeline_parallel_degree must be at least 1");
  check_device("smp.default_partition", x.default_device, x.devices);
  return pin_finder{model, tree, x}.run();
}

std::string describe_module(const model_info& model, module_id x) {
  auto& path = model[x.value].path;
  if (!path.empty())
    return "module " + path;
  return x.value == 0 ? "the root" : "module " + std::to_string(x.value);
}

std::string describe_reason(const merge_reason& x) {
  switch (x.what) {
    case merge_reason::kind::shared_parameter:
      return "they share parameter " + x.text;
    case merge_reason::kind::shared_buffer:
      return "they share buffer " + x.text;
    case merge_reason::kind::not_interceptable:
    case merge_reason::kind::unsendable:
      break;
  }
  return x.text;
}

} // namespace smp
