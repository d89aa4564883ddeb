#include "runtime/deferred/boxed_call.hpp"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace smp {

namespace {

template <size_t N>
bool is_one_of(const std::string& x,
               const std::array<std::string_view, N>& names) {
  return std::find(names.begin(), names.end(), x) != names.end();
}

} // namespace

bool needs_no_bytes(const std::string& name) {
  static constexpr std::array<std::string_view, 8> names = {
    "aten::requires_grad_", "aten::retain_grad",
    "aten::is_leaf",        "aten::output_nr",
    "aten::_version",       "aten::set_data",
    "aten::data",           "aten::_has_compatible_shallow_copy_type",
  };
  return reads_metadata_only(name) || is_one_of(name, names);
}

bool changes_more_than_it_says(const std::string& name) {
  static constexpr std::array<std::string_view, 6> names = {
    "aten::batch_norm",    "aten::_batch_norm_impl_index",
    "aten::instance_norm", "aten::native_batch_norm",
    "aten::set_",          "aten::cudnn_batch_norm",
  };
  return is_one_of(name, names);
}

bool is_random(const boxed_call& x) {
  if (x.op.hasTag(at::Tag::nondeterministic_seeded))
    return true;
  for (auto& argument : x.schema.arguments())
    if (argument.name() == "generator")
      return true;
  return false;
}

bool draws_by_size(const std::string& name) {
  static constexpr std::array<std::string_view, 11> names = {
    "aten::normal_",     "aten::uniform_",     "aten::random_",
    "aten::bernoulli_",  "aten::geometric_",   "aten::exponential_",
    "aten::log_normal_", "aten::cauchy_",      "aten::randn_like",
    "aten::rand_like",   "aten::randint_like",
  };
  return is_one_of(name, names);
}

bool fills_in_order(const std::string& name) {
  return name == "aten::normal_" || name == "aten::uniform_";
}

bool makes_and_fills(const std::string& name) {
  return name == "aten::randn" || name == "aten::rand";
}

} // namespace smp
