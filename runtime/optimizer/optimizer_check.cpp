#include "runtime/optimizer/optimizer_check.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "transport/bytes.hpp"
#include "transport/error.hpp"
#include "transport/exchange.hpp"

#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// A group of an optimizer, as other ranks can compare it.
struct group_outline {
  std::vector<uint32_t> parameters; // positions in the model's tensors
  std::vector<std::pair<std::string, double>> options;
};

template <class Inspector>
bool inspect(Inspector& f, group_outline& x) {
  return f.object(x).fields(f.field("parameters", x.parameters),
                            f.field("options", x.options));
}

struct optimizer_outline {
  /// Why it fits no model with these parameters; empty: it does.
  std::string wrong;
  std::vector<group_outline> groups;
};

template <class Inspector>
bool inspect(Inspector& f, optimizer_outline& x) {
  return f.object(x).fields(f.field("wrong", x.wrong),
                            f.field("groups", x.groups));
}

namespace {

std::string describe(const at::Tensor& x) {
  if (!x.defined())
    return "undefined";
  return c10::str(c10::toString(x.scalar_type()), " ", x.sizes());
}

/// Options of unknown optimizer types are not compared.
std::vector<std::pair<std::string, double>>
known_options(torch::optim::Optimizer& x,
              torch::optim::OptimizerOptions& group) {
  try {
    auto all = options_of(x, group);
    return {all.begin(), all.end()};
  } catch (const error&) {
    return {};
  }
}

/// @returns why a group takes no sparse gradients: "AdamW takes none"; empty:
/// it takes them
std::string refusal_of_sparse(torch::optim::Optimizer& x,
                              torch::optim::OptimizerOptions& group) {
  auto options = known_options(x, group);
  if (options.empty())
    return {};
  auto type = type_of(x);
  if (type == "SparseAdam") // of Python
    return {};
  if (type != "SGD" && type != "Adagrad")
    return type + " takes none";
  auto decay = std::ranges::find(options, "weight_decay",
                                 &std::pair<std::string, double>::first);
  return decay != options.end() && decay->second != 0
           ? type + " takes none with a weight decay"
           : std::string{};
}

std::string refuse_sparse(const std::string& parameter,
                          const std::string& why) {
  return fmt::format(
    "parameter '{}' has sparse gradients, and {}: make its Embedding with "
    "sparse = false, or use SGD or Adagrad without weight decay",
    parameter, why);
}

bool is_of_sparse_embedding(const walked_model& model, uint32_t tensor) {
  return std::ranges::any_of(model.tensors[tensor].modules, [&](auto module) {
    if (model.modules[module].type.find("Embedding") == std::string::npos)
      return false;
    auto found = native_of(model, module);
    return found && found->sparse;
  });
}

optimizer_outline outline_of(torch::optim::Optimizer& x, const model_map& map) {
  optimizer_outline result;
  auto& groups = x.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    auto& outline = result.groups.emplace_back();
    outline.options = known_options(x, groups[g].options());
    auto& parameters = groups[g].params();
    auto no_sparse = refusal_of_sparse(x, groups[g].options());
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto found = map.model().find(parameters[i]);
      auto is_buffer = found >= 0
                       && map.model()
                            .tensors[static_cast<size_t>(found)]
                            .is_buffer;
      if (found < 0 || is_buffer) {
        result.wrong = fmt::format(
          "the optimizer's group {} has a tensor that is not a parameter of "
          "the "
          "distributed model: {}, {}; make the optimizer from the parameters "
          "of the model itself",
          g, describe(parameters[i]),
          is_buffer
            ? "its buffer '" + map.tensor_name(static_cast<uint32_t>(found))
                + "'"
            : "number " + std::to_string(i) + " of those that this rank owns");
        return result;
      }
      auto tensor = static_cast<uint32_t>(found);
      if (!no_sparse.empty() && parameters[i].requires_grad()
          && is_of_sparse_embedding(map.model(), tensor)) {
        result.wrong = refuse_sparse(map.tensor_name(tensor), no_sparse);
        return result;
      }
      outline.parameters.push_back(tensor);
    }
  }
  return result;
}

/// @returns how `x` differs from `of_first`: "group 0 has lr = 0.1, and not
/// 0.2"; empty if it does not
std::string difference(const model_map& map, const group_outline& x,
                       const group_outline& of_first) {
  auto name = [&](const group_outline& y, size_t i) {
    return i < y.parameters.size()
             ? "'" + map.tensor_name(y.parameters[i]) + "'"
             : std::string{"nothing"};
  };
  auto n = std::max(x.parameters.size(), of_first.parameters.size());
  for (size_t i = 0; i < n; ++i)
    if (name(x, i) != name(of_first, i))
      return fmt::format("has {} as number {}, and not {}", name(x, i), i,
                         name(of_first, i));
  for (size_t i = 0; i < std::min(x.options.size(), of_first.options.size());
       ++i)
    if (x.options[i] != of_first.options[i])
      return fmt::format("has {} = {}, and not {}", x.options[i].first,
                         x.options[i].second, of_first.options[i].second);
  return {};
}

std::string difference(const model_map& map, const optimizer_outline& x,
                       const optimizer_outline& of_first) {
  if (x.groups.size() != of_first.groups.size())
    return fmt::format("it has {} groups, and not {}", x.groups.size(),
                       of_first.groups.size());
  for (size_t g = 0; g < x.groups.size(); ++g)
    if (auto how = difference(map, x.groups[g], of_first.groups[g]);
        !how.empty())
      return fmt::format("its group {} {}", g, how);
  return {};
}

} // namespace

void refuse_complex_parameters(const walked_model& model) {
  for (auto& x : model.tensors)
    if (!x.is_buffer && x.tensor.is_complex() && x.tensor.requires_grad())
      throw config_error(fmt::format(
        "parameter '{}' is complex, which LibTorch's optimizers do not train: "
        "register a real one with a last axis of 2 instead (for an initial "
        "value: torch::view_as_real), and use torch::view_as_complex of it in "
        "forward",
        x.names.front()));
}

void refuse_sparse_gradients(
  torch::optim::Optimizer& x,
  const std::function<std::string(const at::Tensor&)>& name_of) {
  for (auto& group : x.param_groups())
    for (auto& p : group.params()) {
      if (!p.grad().defined() || !p.grad().is_sparse())
        continue;
      if (auto why = refusal_of_sparse(x, group.options()); !why.empty())
        throw config_error(refuse_sparse(name_of(p), why));
    }
}

void check_optimizer(const rank_context& rank, torch::optim::Optimizer& x,
                     const model_map& map) {
  auto world = world_of(rank);
  std::vector<optimizer_outline> all;
  for (auto& y : rank.exchange().all_gather(world, "smp.optimizer",
                                            to_payload(outline_of(x, map))))
    all.push_back(
      from_payload<optimizer_outline>(y, "outline of an optimizer"));
  auto is_wrong = [](const optimizer_outline& y) { return !y.wrong.empty(); };
  if (auto i = std::ranges::find_if(all, is_wrong); i != all.end()) {
    auto everywhere = std::ranges::all_of(all, is_wrong);
    auto who = world[static_cast<size_t>(i - all.begin())];
    throw error{
      failure{error_code::config, everywhere ? no_rank : who, {}, i->wrong}};
  }
  for (size_t i = 0; i < all.size(); ++i) {
    auto first = rank.layout().members(comm_group::dp, world[i]).front();
    auto at = static_cast<size_t>(std::ranges::find(world, first)
                                  - world.begin());
    if (auto how = difference(map, all[i], all[at]); !how.empty())
      throw error{failure{
        error_code::config,
        world[i],
        {},
        fmt::format("another optimizer than on rank {}, which holds the same "
                    "modules: {}; all ranks must make the same optimizer",
                    first.value, how)}};
  }
}

} // namespace smp
