#include "partition/search/cost.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace smp {

namespace {

// Costs are products memory x compute x alpha, and are later multiplied by a
// number of devices: 48 + 48 + 20 + 12 bits.
constexpr double max_sum = 0x1p48;
constexpr uint64_t alpha_unit = 1'000'000;

bool is_integer(double x) {
  return std::abs(x - std::round(x)) <= x * 0x1p-50;
}

/// @returns the power of ten that makes all of `xs` integers, or 0.
double decimal_scale(const std::vector<double>& xs) {
  double scale = 1;
  for (int digits = 0; digits <= 9; ++digits, scale *= 10)
    if (std::all_of(xs.begin(), xs.end(),
                    [scale](double x) { return is_integer(x * scale); }))
      return scale;
  return 0;
}

uint64_t alpha_in_millionths(double memory_weight) {
  if (!(memory_weight >= 0 && memory_weight <= 1))
    throw error{error_code::config,
                "smp.memory_weight = " + std::to_string(memory_weight)
                  + " is not between 0 and 1"};
  return static_cast<uint64_t>(std::llround(memory_weight * alpha_unit));
}

void check(const model_info& model, const std::vector<double>& xs,
           const char* what) {
  for (size_t i = 0; i < xs.size(); ++i)
    if (!(xs[i] >= 0) || std::isinf(xs[i]))
      throw error{error_code::config,
                  std::string{what} + " of module " + std::to_string(i) + " ("
                    + model[i].path + ") is " + std::to_string(xs[i])
                    + ", which is not a cost"};
}

/// @returns the sum of `xs` over the modules of each node.
std::vector<exact_cost> per_node(const module_tree& tree,
                                 const std::vector<uint64_t>& xs) {
  std::vector<exact_cost> result(tree.size());
  for (size_t i = 0; i < xs.size(); ++i)
    result[tree.node_of(module_id{i})] += xs[i];
  return result;
}

} // namespace

std::vector<uint64_t> to_integers(const std::vector<double>& xs) {
  auto sum = std::accumulate(xs.begin(), xs.end(), 0.0);
  auto scale = decimal_scale(xs);
  if (scale == 0 || sum * scale >= max_sum)
    scale = 0.5 * max_sum / sum;
  std::vector<uint64_t> result;
  for (auto x : xs)
    result.push_back(static_cast<uint64_t>(std::llround(x * scale)));
  return result;
}

double own_memory(const module_info& x) {
  auto result = x.activations;
  for (auto& parameter : x.parameters)
    result += static_cast<double>(parameter.elements);
  return result;
}

std::vector<double> own_compute(const model_info& model) {
  auto measured = std::any_of(model.begin(), model.end(),
                              [](auto& x) { return x.compute.has_value(); });
  std::vector<double> result;
  for (auto& x : model)
    result.push_back(measured ? x.compute.value_or(0) : 1);
  return result;
}

cost_table::cost_table(const model_info& model, const module_tree& tree,
                       double memory_weight)
  : own_(tree.size()) {
  auto alpha = alpha_in_millionths(memory_weight);
  std::vector<double> memory;
  for (auto& x : model)
    memory.push_back(own_memory(x));
  check(model, memory, "memory");
  auto compute = own_compute(model);
  check(model, compute, "compute");
  auto memories = per_node(tree, to_integers(memory));
  auto computes = per_node(tree, to_integers(compute));
  auto sum = [](const std::vector<exact_cost>& xs) {
    auto result = std::accumulate(xs.begin(), xs.end(), exact_cost{0});
    return std::max(result, exact_cost{1});
  };
  auto memory_sum = sum(memories);
  auto compute_sum = sum(computes);
  for (size_t i = 0; i < own_.size(); ++i)
    own_[i] = alpha * memories[i] * compute_sum
              + (alpha_unit - alpha) * computes[i] * memory_sum;
  subtree_ = own_;
  for (size_t i = tree.size(); i-- > 1;)
    subtree_[tree[i].parent] += subtree_[i];
}

double cost_table::share(exact_cost x) const {
  if (total() == 0)
    return 0;
  return static_cast<double>(static_cast<long double>(x)
                             / static_cast<long double>(total()));
}

} // namespace smp
