#include "runtime/calls/backward_engine.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/base/script_error_text.hpp"
#include "runtime/execution/device_failure.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/model/model_map.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <string>
#include <vector>

namespace smp {

namespace {

std::string (*taken_from_interpreter)() = nullptr;

[[noreturn]] void fail(running_call& ex, std::string text) {
  auto& rank = ex.rank();
  text = with_device_failure(rank, std::move(text));
  ++rank.counters().failed_graphs;
  if (auto changed = rank.model()->map->order().changed_in_place();
      !changed.empty()) {
    constexpr size_t most = 3;
    auto more = changed.size() > most
                  ? fmt::format(" and {} more", changed.size() - most)
                  : std::string{};
    changed.resize(std::min(changed.size(), most));
    text += fmt::format(" (this step changed in place: {}{})",
                        fmt::join(changed, ", "), more);
  }
  throw error{
    failure{error_code::user_code, rank.self(), ex.module_path(), text}};
}

} // namespace

void run_engine(running_call& ex, const torch::autograd::edge_list& roots,
                const torch::autograd::variable_list& gradients,
                bool keep_graph) {
  running_call::backward_scope running{ex};
  auto module = ex.module_path();
  try {
    torch::autograd::Engine::get_default_engine().execute(
      roots, gradients, keep_graph, false, true);
    settle_device(ex);
    ex.enter_module(std::move(module)); // hooks may have entered others
  } catch (const error&) {
    throw;
  } catch (const c10::Error& e) {
    fail(ex, script_error_text(e.what_without_backtrace()));
  } catch (const std::exception& e) {
    auto text = taken_from_interpreter != nullptr ? taken_from_interpreter()
                                                  : std::string{};
    fail(ex, text.empty() ? script_error_text(e.what()) : text);
  }
}

void take_engine_errors(std::string (*take)()) noexcept {
  taken_from_interpreter = take;
}

} // namespace smp
