#include "tp/layer_norm.hpp"

#include "tp/functions.hpp"
#include "tp/refusals.hpp"
#include "tp/tensor_group.hpp"
#include "transport/error.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>

namespace smp::nn {

namespace {

namespace ag = torch::autograd;

at::Tensor parameter_of(const native_module& x, const char* name) {
  auto i = x.parameters.find(name);
  return i == x.parameters.end() ? at::Tensor{} : i->second;
}

/// Tells whether autocast runs a layer norm in float32, which it does on GPUs
/// and not on CPUs.
bool is_widened(c10::DeviceType device) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow(
    "aten::layer_norm", "");
  namespace ac = at::autocast;
  return ac::is_autocast_enabled(device)
         && native.hasKernelForDispatchKey(
           ac::get_autocast_dispatch_key_from_device_type(device));
}

// -- normalising --------------------------------------------------------------

/// The moments of the channels of all peers: [rows] each.
struct moments {
  at::Tensor shift; // roughly the mean, the same on all peers
  at::Tensor rest;  // the mean minus `shift`
  at::Tensor variance;
};

/// x: [rows, n / T], with equally many channels on each peer
moments moments_of(const at::Tensor& x, const std::string& name) {
  // A mean is rounded to the precision of its inputs; the mean of the
  // differences from it shows the rounding error.
  auto mean = x.mean(-1);
  auto off = x - mean.unsqueeze(-1);
  auto rest = off.mean(-1);
  auto variance = (off - rest.unsqueeze(-1)).square().mean(-1);
  auto all = tensor_group::current().allgather(
    at::stack({mean, rest, variance}), name); // [T, 3, rows]
  auto shift = all.select(1, 0).select(0, 0);
  auto distance = all.select(1, 0) - shift + all.select(1, 1); // [T, rows]
  auto middle = distance.mean(0);
  return {shift, middle,
          all.select(1, 2).mean(0) + (distance - middle).square().mean(0)};
}

/// x: [rows, n / T] in the type used to compute @returns as `x`
struct normalize_function : ag::Function<normalize_function> {
  static at::Tensor forward(ag::AutogradContext* c, const at::Tensor& x,
                            double eps, const std::string& name) {
    auto m = moments_of(x, name);
    auto scale = (m.variance + eps).rsqrt().unsqueeze(-1);
    auto result = ((x - m.shift.unsqueeze(-1)) - m.rest.unsqueeze(-1)) * scale;
    c->save_for_backward({result, scale});
    c->saved_data["name"] = name;
    return result;
  }

  static ag::variable_list backward(ag::AutogradContext* c,
                                    const ag::variable_list& grads) {
    refuse_second_derivatives(c->saved_data["name"].toStringRef());
    auto saved = c->get_saved_variables();
    const auto &y = saved[0], &scale = saved[1], &g = grads[0];
    auto& group = tensor_group::current();
    auto n = y.size(-1) * static_cast<int64_t>(group.size());
    auto sums = group.allreduce(at::stack({g.sum(-1), (g * y).sum(-1)}),
                                c->saved_data["name"].toStringRef())
                / static_cast<double>(n);
    return {(g - sums.select(0, 0).unsqueeze(-1)
             - y * sums.select(0, 1).unsqueeze(-1))
              * scale,
            {},
            {}};
  }
};

// -- module -------------------------------------------------------------------

class layer_norm_of_peers final : public distributed_module {
public:
  explicit layer_norm_of_peers(const native_module& x)
    : name_(x.name),
      axes_(static_cast<int64_t>(x.normalized_shape.size())),
      weight_(parameter_of(x, "weight")),
      bias_(parameter_of(x, "bias")),
      eps_(x.eps) {
    // nop
  }

  std::vector<at::Tensor>
  forward(std::span<const at::Tensor> xs) const override {
    auto& x = only_tensor(name_, xs);
    if (x.dim() <= axes_)
      throw error{error_code::user_code,
                  "'" + name_ +
                      "' normalises all axes of its input, but ranks share it "
                      "by samples: give it a first axis of samples, or do not "
                      "share it"};
    auto mine = split_batch_for_tp(x, -1);
    auto normalized = layer_norm_for_tp(mine, axes_, weight_, bias_, eps_);
    return {merge_batch_for_tp(normalized, -1)};
  }

private:
  std::string name_;
  int64_t axes_;
  at::Tensor weight_;
  at::Tensor bias_;
  double eps_;
};

std::string refusal_of_norm(const native_module& x, int64_t peers) {
  if (x.normalized_shape.empty())
    return "its code does not tell which axes it normalises; export it with "
           "a constant normalized_shape";
  auto channels = x.normalized_shape.back();
  return can_divide(channels, peers)
           ? std::string{}
           : refusal_to_divide(channels, "channels", peers);
}

parameter_slices slices_of_norm(const native_module& x, int64_t rank,
                                int64_t peers) {
  parameter_slices result;
  auto channels = x.normalized_shape.back() / peers;
  for (auto& [name, t] : x.parameters)
    result[name] = {t.dim() - 1, rank * channels, channels, t.sizes().vec()};
  return result;
}

std::unique_ptr<distributed_module> make_norm(const native_module& x,
                                              const parameter_slices&) {
  return std::make_unique<layer_norm_of_peers>(x);
}

} // namespace

at::Tensor layer_norm_for_tp(const at::Tensor& x, int64_t axes,
                             const at::Tensor& weight, const at::Tensor& bias,
                             double eps) {
  auto type = is_widened(x.device().type()) ? at::kFloat : x.scalar_type();
  auto computed = type == at::kDouble ? at::kDouble : at::kFloat;
  auto sizes = x.sizes().vec();
  auto rows = x.to(computed).flatten(x.dim() - axes).flatten(0, -2);
  auto y = normalize_function::apply(rows, eps,
                                     tensor_group::current().next_name())
             .view(sizes);
  if (weight.defined())
    y = y * weight.to(computed);
  if (bias.defined())
    y = y + bias.to(computed);
  return y.to(type);
}

at::Tensor rms_norm_for_tp(const at::Tensor& x, const at::Tensor& weight,
                           double eps) {
  auto y = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  auto channels = x.size(-1)
                  * static_cast<int64_t>(tensor_group::current().size());
  // All peers have the sum, and each uses it in another way.
  auto sum = bwd_allreduce_for_tp(
    fwd_allreduce_for_tp(y.square().sum(-1, true)));
  auto scaled = x * at::rsqrt(sum / static_cast<double>(channels) + eps);
  return weight * scaled.to(weight.scalar_type());
}

const distribution layer_norm_distribution{.type = "LayerNorm",
                                           .only_by_name = true,
                                           .refusal = refusal_of_norm,
                                           .slices = slices_of_norm,
                                           .make = make_norm};

} // namespace smp::nn
