#include "runtime/sharing/tp_register.hpp"

#include "runtime/model/script_walk.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "tp/distributions.hpp"
#include "tp/refusals.hpp"
#include "transport/error.hpp"

#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <fmt/format.h>

#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace smp {

namespace {

/// What users registered about their classes, by type.
struct registry {
  std::mutex mutex;
  std::map<std::string, std::string, std::less<>> names;
  std::map<std::string, registered_class, std::less<>> classes;
  /// Of classes that were registered again: modules that are already
  /// shared still use these.
  std::vector<std::shared_ptr<const call_translation>> former_calls;

  static registry& get() {
    static registry result;
    return result;
  }
};

} // namespace

std::optional<std::string> registered_name(std::string_view type) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  auto i = known.names.find(type);
  return i == known.names.end() ? std::nullopt : std::optional{i->second};
}

std::optional<registered_class> registration_of(const std::string& type) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  auto i = known.classes.find(type);
  return i == known.classes.end() ? std::nullopt : std::optional{i->second};
}

bool tp_register(std::string_view type, std::string_view as) {
  if (auto* how = find_distribution(as); !how || how->of_layer)
    throw config_error(
      fmt::format("tp_register: no distributed module is "
                  "called \"{}\"; there are {}",
                  as, known_distributions()));
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  known.names.insert_or_assign(std::string{type}, std::string{as});
  return true;
}

bool register_native(const std::type_info& impl, std::string_view as) {
  return tp_register(c10::demangle(impl.name()), as);
}

bool register_class(const std::type_info& impl, registered_class x) {
  return register_class(c10::demangle(impl.name()), std::move(x));
}

bool register_class(std::string_view type, registered_class x) {
  auto& known = registry::get();
  std::lock_guard guard{known.mutex};
  auto& entry = known.classes[std::string{type}];
  if (entry.calls)
    known.former_calls.push_back(std::move(entry.calls));
  entry = std::move(x);
  return true;
}

const call_translation* translation_of(const walked_module& x) {
  auto known = registration_of(x.type);
  return known ? known->calls.get() : nullptr;
}

std::shared_ptr<const script_translation>
script_translation_of(const walked_module& x) {
  auto known = registration_of(x.type);
  return known ? known->script_calls : nullptr;
}

child_result result_of(const walked_module& x) {
  auto known = registration_of(x.type);
  return known ? known->result : nullptr;
}

const torch::nn::Module& detail::object_of(const walked_module& x) {
  return *x.object;
}

void detail::with_script(
  const walked_module& x,
  const std::function<void(const torch::jit::Module&)>& f) {
  f(torch::jit::Module{script_object::reclaim_copy(x.script)});
}

void detail::check_script_arguments(const std::string& type,
                                    const std::vector<c10::IValue>& xs,
                                    size_t wanted) {
  if (xs.size() != wanted)
    throw error{error_code::user_code,
                fmt::format("the forward hook of {} takes {} arguments, but "
                            "its forward has {}",
                            type, wanted, xs.size())};
}

void detail::refuse_script_argument(const std::string& type, size_t i,
                                    const c10::IValue& x) {
  throw error{error_code::user_code,
              fmt::format("the forward hook of {} takes something else as its "
                          "argument {} than what the file gives, a {}",
                          type, i, x.type()->repr_str())};
}

std::string detail::short_name(const std::type_info& x) {
  auto name = c10::demangle(x.name());
  auto last = name.substr(0, name.find('<')).rfind("::");
  return last == name.npos ? name : name.substr(last + 2);
}

// -- along axes ---------------------------------------------------------------

std::string refusal_of_axes(const native_module& x, const parameter_axes& axes,
                            int64_t peers) {
  for (auto& [name, axis] : axes) {
    auto i = x.parameters.find(name);
    if (i == x.parameters.end())
      return fmt::format(
        "its distributed module cuts a parameter '{}', which "
        "it does not have; its axes() have to name one of its own",
        name);
    auto sizes = i->second.sizes();
    if (axis < 0 || axis >= static_cast<int64_t>(sizes.size()))
      return fmt::format(
        "its '{}' has {} axes, and is to be cut along {}; "
        "axes() count from 0",
        name, sizes.size(), axis);
    if (auto n = sizes[static_cast<size_t>(axis)]; !nn::can_divide(n, peers))
      return nn::refusal_to_divide(
        n, fmt::format("numbers along axis {} of '{}'", axis, name), peers);
  }
  return {};
}

parameter_slices slices_of_axes(const native_module& x,
                                const parameter_axes& axes, int64_t rank,
                                int64_t peers) {
  parameter_slices result;
  for (auto& [name, axis] : axes) {
    auto& t = x.parameters.at(name);
    auto length = t.size(axis) / peers;
    result[name] = {axis, rank * length, length, t.sizes().vec()};
  }
  return result;
}

} // namespace smp
