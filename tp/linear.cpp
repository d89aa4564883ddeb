#include "tp/linear.hpp"

#include "tp/linears.hpp"
#include "tp/refusals.hpp"

#include <string>
#include <utility>

namespace smp::nn {

namespace {

class linear_of_peers final : public distributed_module {
public:
  /// @param bias undefined, or empty on all peers but the first
  /// @param inputs axis of `weight`
  linear_of_peers(std::string name, at::Tensor weight, at::Tensor bias,
                  int64_t inputs)
    : name_(std::move(name)),
      weight_(std::move(weight)),
      bias_(std::move(bias)),
      inputs_(inputs) {
    // nop
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto& x = only_tensor(name_, xs);
    auto weight = inputs_ == 1 ? weight_ : weight_.t();
    auto alone = x.dim() == 1; // one sample without an axis for them
    auto result = scattered_linear_for_tp(alone ? x.unsqueeze(0) : x,
                                          entry::exchange, weight, bias_);
    return {alone ? result.squeeze(0) : result};
  }

private:
  std::string name_;
  at::Tensor weight_;
  at::Tensor bias_;
  int64_t inputs_;
};

template <int64_t Inputs>
std::string refusal_of_linear(const native_module& x, int64_t peers) {
  auto inputs = x.parameters.at("weight").size(Inputs);
  return can_divide(inputs, peers)
           ? std::string{}
           : refusal_to_divide(inputs, "input channels", peers);
}

template <int64_t Inputs>
parameter_slices slices_of_linear(const native_module& x, int64_t rank,
                                  int64_t peers) {
  auto& weight = x.parameters.at("weight");
  auto inputs = weight.size(Inputs) / peers;
  parameter_slices result;
  result["weight"] = {Inputs, rank * inputs, inputs, weight.sizes().vec()};
  if (auto bias = x.parameters.find("bias"); bias != x.parameters.end()) {
    auto outputs = bias->second.size(0);
    result["bias"] = {0, rank == 0 ? 0 : outputs, rank == 0 ? outputs : 0,
                      bias->second.sizes().vec()};
  }
  return result;
}

template <int64_t Inputs>
std::unique_ptr<distributed_module> make_linear(const native_module& x,
                                                const parameter_slices&) {
  auto bias = x.parameters.find("bias");
  return std::make_unique<linear_of_peers>(
    x.name, x.parameters.at("weight"),
    bias == x.parameters.end() ? at::Tensor{} : bias->second, Inputs);
}

} // namespace

const distribution linear_distribution{.type = "Linear",
                                       .refusal = refusal_of_linear<1>,
                                       .slices = slices_of_linear<1>,
                                       .make = make_linear<1>};

const distribution conv1d_distribution{.type = "Conv1D",
                                       .refusal = refusal_of_linear<0>,
                                       .slices = slices_of_linear<0>,
                                       .make = make_linear<0>};

} // namespace smp::nn
