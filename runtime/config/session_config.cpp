#include "runtime/config/session_config.hpp"

#include <charconv>
#include <tuple>

namespace smp {

uint64_t effective_active_microbatches(const session_config& x,
                                       uint64_t microbatches) {
  return x.active_microbatches.value_or(default_active_microbatches(
    x.pipeline, microbatches, x.pipeline_parallel_degree,
    x.tensor_parallel_degree));
}

std::optional<std::pair<uint64_t, uint64_t>>
parse_traced_steps(const std::string& x) {
  if (x.empty())
    return std::pair<uint64_t, uint64_t>{0, 0};
  auto* end = x.data() + x.size();
  std::pair<uint64_t, uint64_t> result;
  auto [stopped, wrong] = std::from_chars(x.data(), end, result.first);
  result.second = result.first;
  if (wrong == std::errc{} && stopped != end && *stopped == '-')
    std::tie(stopped, wrong) = [&] {
      auto y = std::from_chars(stopped + 1, end, result.second);
      return std::pair{y.ptr, y.ec};
    }();
  if (wrong != std::errc{} || stopped != end || result.first == 0
      || result.second < result.first)
    return std::nullopt;
  return result;
}

std::optional<uint64_t> checkpointed_together(std::string_view strategy) {
  constexpr std::string_view prefix = "group_";
  if (strategy == "each")
    return 1;
  if (strategy == "contiguous")
    return 0;
  if (!strategy.starts_with(prefix))
    return std::nullopt;
  strategy.remove_prefix(prefix.size());
  uint64_t result = 0;
  auto* end = strategy.data() + strategy.size();
  auto [stopped, err] = std::from_chars(strategy.data(), end, result);
  if (err != std::errc{} || stopped != end || result == 0)
    return std::nullopt;
  return result;
}

std::optional<std::pair<std::string, std::string>>
class_and_type(std::string_view entry) {
  constexpr std::string_view as = " as ";
  auto at = entry.find(as);
  if (at == entry.npos)
    return std::nullopt;
  std::pair result{std::string{entry.substr(0, at)},
                   std::string{entry.substr(at + as.size())}};
  auto is_name = [](const std::string& x) {
    return !x.empty() && x.find(' ') == x.npos;
  };
  if (!is_name(result.first) || !is_name(result.second))
    return std::nullopt;
  return result;
}

double effective_memory_weight(const session_config& x) {
  if (x.memory_weight)
    return *x.memory_weight;
  return x.optimize == "speed" ? 0.2 : 0.8;
}

} // namespace smp
