#include "partition/trace.hpp"

#include "partition/manual.hpp"
#include "partition/search/problem.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

namespace smp {

namespace {

constexpr auto never = std::numeric_limits<uint64_t>::max();

/// A forward phase shorter than this, in seconds, is mostly the overhead of the
/// calls, and its times vary between measurements by more than modules differ:
/// no decision may depend on them.
constexpr double least_time = 1e-3;

/// Backward takes twice as long as forward.
constexpr double both_phases = 3;

/// Properties that modules have in common if they should take equally long.
using kinship = std::tuple<std::string, std::vector<uint64_t>, size_t, uint64_t,
                           uint64_t>;

std::vector<uint64_t> own_sizes(const module_info& x) {
  std::vector<uint64_t> result;
  for (auto& parameter : x.parameters)
    result.push_back(parameter.elements);
  return result;
}

uint64_t own_elements(const module_info& x) {
  uint64_t result = 0;
  for (auto& parameter : x.parameters)
    result += parameter.elements;
  return result;
}

double median(std::vector<double> xs) {
  auto middle = xs.begin() + static_cast<ptrdiff_t>(xs.size() / 2);
  std::nth_element(xs.begin(), middle, xs.end());
  return *middle;
}

/// Has code of its own that calls can show: is neither a list nor a module
/// whose calls count as its parent's.
bool is_visible(const model_info& model, size_t i) {
  return i > 0 && !model[i].container && model[i].not_interceptable.empty();
}

/// For each module, the first call of it or of any module below it.
std::vector<uint64_t> first_calls(const model_info& model,
                                  const trace_result& x) {
  std::vector<uint64_t> result(model.size(), never);
  for (size_t i = 0; i < model.size(); ++i)
    if (x.modules[i].calls > 0)
      result[i] = x.modules[i].first;
  // Children need not come after their parents; deep models are rare, so a few
  // rounds suffice.
  for (auto changed = true; changed;) {
    changed = false;
    for (size_t i = model.size(); i-- > 0;)
      for (auto child : model[i].children)
        if (result[child.value] < result[i]) {
          result[i] = result[child.value];
          changed = true;
        }
  }
  return result;
}

void order_children(model_info& model, const trace_result& x) {
  auto first = first_calls(model, x);
  for (auto& m : model) {
    // A module that was not called stays after its neighbour in the code.
    std::vector<std::pair<uint64_t, module_id>> keyed;
    uint64_t last = 0;
    for (auto child : m.children) {
      if (first[child.value] != never)
        last = first[child.value];
      keyed.emplace_back(last, child);
    }
    std::stable_sort(keyed.begin(), keyed.end(),
                     [](auto& a, auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < keyed.size(); ++i)
      m.children[i] = keyed[i].second;
  }
}

double measured_seconds(const trace_result& x) {
  if (x.repeated_seconds > 0)
    return x.repeated_seconds;
  return std::accumulate(x.modules.begin(), x.modules.end(), 0.0,
                         [](double sum, auto& y) { return sum + y.seconds; });
}

/// Gives all calls the same time, with the sum `least_time`.
void set_times_by_calls(model_info& model, const trace_result& x) {
  std::vector<double> calls(model.size());
  for (size_t i = 0; i < model.size(); ++i)
    calls[i] = x.modules[i].calls > 0 ? static_cast<double>(x.modules[i].calls)
               : is_visible(model, i) ? 1
                                      : 0;
  auto all = std::accumulate(calls.begin(), calls.end(), 0.0);
  for (size_t i = 0; i < model.size(); ++i)
    model[i].compute = least_time * calls[i] / all;
}

void set_times(model_info& model, const trace_result& x) {
  std::map<kinship, std::vector<size_t>> kin;
  double seconds = 0;
  uint64_t elements = 0;
  for (size_t i = 0; i < model.size(); ++i) {
    auto& y = x.modules[i];
    if (y.calls == 0)
      continue;
    kin[{model[i].type, own_sizes(model[i]), model[i].children.size(), y.calls,
         y.transfer_bytes}]
      .push_back(i);
    seconds += y.seconds;
    elements += own_elements(model[i]);
  }
  for (auto& [key, members] : kin) {
    std::vector<double> times;
    for (auto i : members)
      times.push_back(x.modules[i].seconds);
    for (auto i : members)
      model[i].compute = median(times);
  }
  auto per_element = elements > 0 ? seconds / static_cast<double>(elements) : 0;
  for (size_t i = 0; i < model.size(); ++i)
    if (x.modules[i].calls == 0)
      model[i].compute = per_element
                         * static_cast<double>(own_elements(model[i]));
}

std::string names_of(const model_info& model,
                     const std::vector<size_t>& modules) {
  auto result = describe_module(model, module_id{modules.front()});
  if (modules.size() > 1)
    result += " and " + std::to_string(modules.size() - 1) + " more";
  return result;
}

} // namespace

bool is_noise(const trace_result& x) {
  return x.times && measured_seconds(x) < least_time;
}

void apply_trace(model_info& model, const trace_result& x,
                 double element_bytes) {
  order_children(model, x);
  for (size_t i = 0; i < model.size(); ++i) {
    auto& y = x.modules[i];
    if (x.memory)
      model[i].activations = static_cast<double>(y.activation_bytes)
                             / element_bytes;
    if (y.calls > 0) {
      model[i].call_bytes = y.transfer_bytes / y.calls;
      model[i].calls = y.calls;
    }
    model[i].waited_for |= y.waited_for;
    model[i].passed_on = y.passed_on;
    model[i].added_to.assign(y.added_to.begin(), y.added_to.end());
    model[i].stays_with = y.unsendable;
  }
  auto timed = std::any_of(x.modules.begin(), x.modules.end(),
                           [](auto& y) { return y.seconds > 0; });
  if (x.times && timed && is_noise(x))
    set_times_by_calls(model, x);
  else if (x.times && timed)
    set_times(model, x);
}

double step_seconds(const model_info& model, const trace_result& x) {
  double forward = 0;
  if (x.times)
    for (auto& m : model)
      forward += m.compute.value_or(0);
  return both_phases * forward;
}

double add_exchange(module_info& x, double bytes) {
  if (!x.compute)
    return 0;
  auto seconds = bytes / communication::rate;
  *x.compute += seconds / both_phases;
  return seconds;
}

std::string describe_trace(const trace_result& x, double step_seconds) {
  auto what = x.times && x.memory ? "time and memory"
              : x.times           ? "time"
                                  : "memory";
  auto result = std::string{what} + " measured on the "
                + (x.on_gpu ? "GPU" : "CPU");
  if (is_noise(x) && step_seconds > 0) {
    result += "; less than 1 ms forward per microbatch is noise, so each call "
              "counts the same";
  } else if (step_seconds > 0) {
    char text[64];
    auto forward = step_seconds / both_phases;
    std::snprintf(text, sizeof(text), ", %.3g %s forward per microbatch",
                  forward < 1 ? forward * 1e3 : forward,
                  forward < 1 ? "ms" : "s");
    result += text;
  }
  return result;
}

std::vector<std::string> explain_trace(const model_info& model,
                                       const trace_result& x) {
  std::vector<std::string> result;
  std::vector<size_t> unseen;
  std::vector<size_t> on_gpu;
  for (size_t i = 0; i < model.size(); ++i) {
    if (x.modules[i].calls == 0 && is_visible(model, i))
      unseen.push_back(i);
    if (x.modules[i].on_gpu)
      on_gpu.push_back(i);
  }
  if (!on_gpu.empty())
    result.push_back(names_of(model, on_gpu)
                     + " cannot run on the CPU: traced on the GPU");
  if (!x.failure.empty()) {
    auto where = x.failed ? describe_module(model, *x.failed) + " cannot be"
                              " traced"
                          : std::string{"the step cannot be traced to its end"};
    result.push_back(
      where + " (" + x.failure + "); "
      + (unseen.empty()
           ? std::string{"its cost"}
           : "the cost of " + std::to_string(unseen.size()) + " modules")
      + " comes from the number of parameters");
  } else if (!unseen.empty()) {
    result.push_back("the first microbatch did not call "
                     + names_of(model, unseen)
                     + ": their times come from the number of parameters");
  }
  return result;
}

} // namespace smp
