#include "runtime/sharing/sharing_costs.hpp"

#include "runtime/sharing/native_modules.hpp"
#include "tp/traffic.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

namespace {

std::string bytes_text(double x) {
  if (x < 1e3)
    return fmt::format("{:.0f} B", x);
  if (x < 1e6)
    return fmt::format("{:.3g} kB", x * 1e-3);
  return fmt::format("{:.{}f} MB", x * 1e-6, x < 1e8 ? 1 : 0);
}

/// @returns how many numbers of a module, with all below it, peer `rank` has,
/// and their total
std::pair<int64_t, int64_t> numbers_of(const walked_model& model,
                                       const shared_module& shared,
                                       const sharing_request& x, int64_t rank) {
  auto slices = slices_of(model, shared, rank, static_cast<int64_t>(x.peers));
  std::pair<int64_t, int64_t> result{0, 0};
  for (auto below : model.subtree(static_cast<uint32_t>(shared.id.value)))
    for (auto i : model.modules[below].tensors) {
      auto& t = model.tensors[i];
      if (t.is_buffer)
        continue;
      auto all = t.tensor.numel();
      auto slice = slices.find(i);
      result.second += all;
      result.first += slice == slices.end()
                        ? all
                        : all / t.tensor.size(slice->second.dim)
                            * slice->second.length * slice->second.blocks;
    }
  return result;
}

/// A trace keeps no graph: a tensor added to scores per head is assumed to be
/// learned, as position biases are, and one for all heads is not.
nn::traced_argument argument_of(const traced_tensor& x) {
  return {x.sizes, x.element_bytes, x.repeats,
          x.element_bytes > 1 && x.sizes.size() == 4 && x.sizes[1] > 1};
}

std::vector<std::vector<nn::traced_argument>>
arguments_of(const module_trace& x) {
  std::vector<std::vector<nn::traced_argument>> result;
  for (auto& call : x.arguments) {
    auto& to = result.emplace_back();
    for (auto& y : call)
      to.push_back(argument_of(y));
  }
  return result;
}

std::optional<double> sent(const walked_model& model,
                           const shared_module& shared,
                           const sharing_request& x, const module_trace& y) {
  auto native = native_of(model, static_cast<uint32_t>(shared.id.value))
                  .value();
  native.saves_memory = shared.saves_memory;
  // A hook gives a layer other arguments than were traced.
  auto& module = model.modules[shared.id.value];
  auto hooked = translation_of(module) || script_translation_of(module);
  if (y.calls == 0 || (native.layer && hooked))
    return std::nullopt;
  return nn::bytes_sent(native, {y.transfer_bytes, y.calls,
                                 static_cast<int64_t>(x.peers), x.prescaled,
                                 arguments_of(y)});
}

} // namespace

shared_traffic find_traffic(const walked_model& model, const sharing_request& x,
                            const trace_result& trace,
                            const sharing_decision& decision) {
  shared_traffic result;
  for (auto& shared : decision.shared)
    if (auto bytes = sent(model, shared, x, trace.modules.at(shared.id.value)))
      result.emplace(shared.id, *bytes);
  return result;
}

void weigh_parts(const walked_model& model, const sharing_decision& decision,
                 const sharing_request& x, bool timed, model_info& info) {
  auto peers = static_cast<double>(x.peers);
  for (auto& [id, saves_memory] : decision.shared)
    for (auto i : model.subtree(static_cast<uint32_t>(id.value))) {
      if (auto& seconds = info[i].compute; seconds && timed)
        *seconds /= peers;
      // For speed each rank has the inputs of linear layers whole.
      if (saves_memory)
        info[i].activations /= peers;
    }
}

std::string weigh_traffic(const shared_traffic& sent, model_info& info) {
  double seconds = 0;
  for (auto& [id, bytes] : sent)
    seconds += add_exchange(info.at(id.value), bytes);
  if (seconds == 0)
    return {};
  return fmt::format(
    "; what ranks send for shared modules adds {:.3g} {} in both phases",
    seconds < 1 ? seconds * 1e3 : seconds, seconds < 1 ? "ms" : "s");
}

void describe_parts(const walked_model& model, const sharing_request& x,
                    const shared_traffic& sent, sharing_decision& decision) {
  for (auto& shared : decision.shared) {
    // The first rank has the remainder rows, and whole biases.
    auto [most, all] = numbers_of(model, shared, x, 0);
    auto least = numbers_of(model, shared, x, static_cast<int64_t>(x.peers) - 1)
                   .first;
    auto bytes = sent.find(shared.id);
    decision.remarks.add(
      fmt::format("each rank holds {}{} of {} parameters{}",
                  most > least ? "at most " : "", most, all,
                  bytes == sent.end()
                    ? ""
                    : fmt::format(" and sends {} in a microbatch",
                                  bytes_text(bytes->second))),
      model.modules[shared.id.value].names.front());
  }
}

} // namespace smp
