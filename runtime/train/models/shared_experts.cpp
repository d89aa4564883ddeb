// Ranks that share a mixture each hold as many of its experts, whole: tokens go
// to the rank of their expert, and its results come back. Sharing the linears
// in experts instead would not do: which of them is called, and for how many
// tokens, depends on each rank's data.

#include "runtime/sharing/tp_register.hpp"
#include "runtime/train/models/moe.hpp"
#include "tp/functions.hpp"
#include "tp/refusals.hpp"
#include "tp/tensor_group.hpp"

#include <torch/nn/functional/linear.h>

#include <fmt/format.h>

namespace smp {

namespace {

struct experts_options {
  int64_t experts = 0;
  double dropout = 0;
  const torch::nn::Module* module = nullptr; // for its mode
};

const experts_options& options_of(const native_module& x) {
  return *static_cast<const experts_options*>(x.options.get());
}

std::string name_of_expert(int64_t i) {
  return fmt::format("experts.expert_{}", i);
}

/// [T, here] -> their sums by rank
std::vector<int64_t> sums_of(const torch::Tensor& x) {
  auto sums = x.sum(1).to(torch::kCPU).contiguous();
  return {sums.data_ptr<int64_t>(), sums.data_ptr<int64_t>() + sums.numel()};
}

/// What this rank does for the tokens of all.
class distributed_experts final : public distributed_module {
public:
  distributed_experts(const native_module& x, int64_t first, int64_t here)
    : options_(options_of(x)),
      name_(x.name),
      router_(x.parameters.at("router.classifier.weight")),
      first_(first),
      here_(here) {
    for (auto i = first; i < first + here; ++i) {
      auto name = name_of_expert(i);
      wi_.push_back(x.parameters.at(name + ".wi.weight"));
      wo_.push_back(x.parameters.at(name + ".wo.weight"));
    }
  }

  /// xs: one of [B, T, C], see `moe_mlp_impl::forward`
  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto& x = only_tensor(name_, xs);
    auto tokens = x.flatten(0, 1);
    auto probabilities = torch::softmax(
      torch::nn::functional::linear(tokens, router_), -1);
    auto [chosen, expert] = probabilities.max(-1);
    auto order = expert.argsort(/*stable=*/true, 0, false);
    auto load = expert.bincount({}, options_.experts); // [E]

    // How many tokens come from each rank for each of the experts here.
    const auto ranks = options_.experts / here_;
    auto loads = nn::scatter_and_merge_for_tp(load.view({ranks, here_}), 0, 0)
                   .view({ranks, here_});
    auto given = sums_of(load.view({ranks, here_}));
    auto taken = sums_of(loads);
    auto in = nn::exchange_rows_for_tp(tokens.index_select(0, order), given,
                                       taken);
    auto back = nn::exchange_rows_for_tp(run_experts(in, loads), taken, given);
    auto result = torch::zeros_like(tokens).index_copy(0, order, back);
    auto shares = load.to(probabilities.scalar_type())
                  / static_cast<double>(expert.numel());
    auto imbalance = (shares * probabilities.mean(0)).sum()
                     * static_cast<double>(options_.experts);
    return {(chosen.unsqueeze(-1) * result).view(x.sizes()), imbalance};
  }

private:
  /// @param x [rows, C], by the rank from which they come, and by expert
  /// @param loads [ranks, experts here]
  torch::Tensor run_experts(const torch::Tensor& x,
                            const torch::Tensor& loads) const {
    if (x.size(0) == 0)
      return x; // in backward this rank still exchanges
    auto of = torch::arange(here_, loads.options())
                .repeat({loads.size(0)})
                .repeat_interleave(loads.flatten());
    auto result = torch::zeros_like(x);
    for (int64_t i = 0; i < here_; ++i) {
      auto rows = of.eq(i).nonzero().squeeze(1);
      if (rows.numel() == 0)
        continue; // not called, as in one process
      auto at = static_cast<size_t>(i);
      auto inner = torch::relu(
        torch::nn::functional::linear(x.index_select(0, rows), wi_[at]));
      if (options_.dropout > 0 && options_.module->is_training())
        inner = inner * dropout_mask(i, loads.select(1, i), inner);
      result = result.index_copy(0, rows,
                                 torch::nn::functional::linear(inner, wo_[at]));
    }
    return result;
  }

  /// What each rank would draw for its tokens (R23).
  torch::Tensor dropout_mask(int64_t i, const torch::Tensor& loads,
                             const torch::Tensor& like) const {
    auto expert = name_ + "." + name_of_expert(first_ + i);
    auto ones = torch::ones_like(like);
    std::vector<torch::Tensor> result;
    for (int64_t peer = 0, begin = 0; peer < loads.size(0); ++peer) {
      auto n = loads[peer].item<int64_t>();
      auto mine = ones.narrow(0, begin, n);
      if (n > 0)
        tensor_group::current().draw_as(
          static_cast<uint64_t>(peer), {expert, expert + ".dropout"}, [&] {
            result.push_back(torch::dropout(mine, options_.dropout, true));
          });
      begin += n;
    }
    return torch::cat(result);
  }

  experts_options options_;
  std::string name_;
  torch::Tensor router_;               // [E, C]
  int64_t first_, here_;               // of the experts
  std::vector<torch::Tensor> wi_, wo_; // [inner, C], [C, inner]
};

std::string refusal(const native_module& x, int64_t peers) {
  auto n = options_of(x).experts;
  return nn::can_divide(n, peers) ? ""
                                  : nn::refusal_to_divide(n, "experts", peers);
}

/// The experts of other ranks are empty here.
parameter_slices slices(const native_module& x, int64_t rank, int64_t peers) {
  parameter_slices result;
  const auto each = options_of(x).experts / peers;
  for (int64_t i = 0; i < options_of(x).experts; ++i)
    for (auto* part : {".wi.weight", ".wo.weight"}) {
      auto name = name_of_expert(i) + part;
      auto sizes = x.parameters.at(name).sizes().vec();
      const auto owner = i / each;
      result[name] = {0, rank > owner ? sizes[0] : 0,
                      rank == owner ? sizes[0] : 0, sizes};
    }
  return result;
}

std::unique_ptr<distributed_module> make(const native_module& x,
                                         const parameter_slices& slices) {
  int64_t first = 0, here = 0;
  for (auto i = options_of(x).experts; i-- > 0;)
    if (slices.at(name_of_expert(i) + ".wi.weight").length > 0) {
      first = i;
      ++here;
    }
  return std::make_unique<distributed_experts>(x, first, here);
}

constexpr distribution experts{.type = "Experts",
                               .refusal = refusal,
                               .slices = slices,
                               .make = make,
                               .counts_samples_once = false,
                               .parts_too = false};

native_module read(const walked_module& module) {
  auto& x = detail::object_of(module);
  auto& mixture = dynamic_cast<const moe_mlp_impl&>(x);
  native_module result;
  result.how = &experts;
  result.type = experts.type;
  auto& each = mixture.by_index;
  result.options = std::make_shared<const experts_options>(experts_options{
    static_cast<int64_t>(each.size()), each.front()->dropout->options.p(), &x});
  return result;
}

[[maybe_unused]] const bool mixture_is_registered = register_class(
  typeid(moe_mlp_impl),
  {.read = read, .result = &detail::result_of_child<moe_mlp_impl>});

} // namespace

} // namespace smp
