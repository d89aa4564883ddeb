#include "runtime/intercept/shared_call.hpp"

#include "actors/board/call_slot.hpp"
#include "runtime/base/here.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/late_logits.hpp"
#include "tp/distributed_module.hpp"
#include "tp/lm_head.hpp"
#include "tp/tensor_group.hpp"
#include "transport/error.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <memory>
#include <utility>

namespace smp {

namespace {

/// Shows the layer, while it computes what was read of its logits, in errors
/// and stall reports, in place of the module that reads.
class shown_module {
public:
  explicit shown_module(std::optional<module_id> x)
    : slot_(x ? here::of_thread().slot : nullptr),
      exceptions_(std::uncaught_exceptions()) {
    if (slot_)
      slot_->enter(*x);
  }

  ~shown_module() {
    if (slot_)
      slot_->leave(std::uncaught_exceptions() > exceptions_);
  }

  shown_module(const shown_module&) = delete;
  shown_module& operator=(const shown_module&) = delete;

private:
  call_slot* slot_;
  int exceptions_;
};

/// The last layer of a language model, called in a microbatch.
class called_head final : public logits_source {
public:
  called_head(const nn::language_head& head, std::optional<module_id> module,
              at::Tensor hidden)
    : head_(head),
      module_(module),
      hidden_(std::move(hidden)),
      version_(version_of(hidden_)) {
    // nop
  }

  at::Tensor logits() override {
    check();
    shown_module shown{module_};
    return head_.forward(std::span{&hidden_, 1}).at(0);
  }

  at::Tensor cross_entropy(const at::Tensor& rows, const at::Tensor& labels,
                           int64_t ignore_index, bool mean) override {
    check();
    shown_module shown{module_};
    auto hidden = hidden_.flatten(0, -2);
    if (rows.defined())
      hidden = hidden.index_select(0, rows.to(hidden.device()));
    return head_.cross_entropy(hidden, labels,
                               {.ignore_index = ignore_index, .mean = mean});
  }

  void made(const at::Tensor& x) override {
    if (auto* in = running_call::current())
      in->add_promise(x); // code that keeps it beyond the phase gets the logits
  }

private:
  static uint32_t version_of(const at::Tensor& x) {
    return x.is_inference() ? 0 : x._version();
  }

  /// @throws error if it is too late to compute with the layer
  void check() const {
    static_cast<void>(tensor_group::current());
    if (version_of(hidden_) != version_)
      throw error{error_code::unsupported,
                  "the hidden states that the last layer took were changed in "
                  "place before its logits were read: change a copy"};
  }

  const nn::language_head& head_;
  std::optional<module_id> module_;
  at::Tensor hidden_;
  uint32_t version_;
};

/// Logits are often the largest tensor of a model although only their loss is
/// wanted, which ranks that share the layer compute without them.
std::optional<at::Tensor> late_logits_of(const call_scope& call,
                                         const distributed_module& how,
                                         std::span<const at::Tensor> xs) {
  auto* head = dynamic_cast<const nn::language_head*>(&how);
  if (!head || !running_call::current() || xs.size() != 1 || xs[0].dim() < 2
      || xs[0].numel() == 0 || c10::InferenceMode::is_enabled())
    return std::nullopt;
  auto& hidden = xs[0];
  auto sizes = hidden.sizes().vec();
  sizes.back() = head->vocabulary();
  auto device = hidden.device().type();
  auto casts = at::autocast::is_autocast_enabled(device)
               && hidden.scalar_type() != at::kDouble;
  auto dtype = casts ? at::autocast::get_autocast_dtype(device)
                     : hidden.scalar_type();
  std::optional<torch::autograd::Edge> gradients;
  if (c10::GradMode::is_enabled()
      && (hidden.requires_grad() || head->requires_grad()))
    gradients = hidden.requires_grad()
                  ? torch::autograd::impl::gradient_edge(hidden)
                  : torch::autograd::Edge{};
  return make_late_logits(
    std::make_shared<called_head>(*head, call.module(), hidden),
    at::empty(sizes, at::TensorOptions{}.dtype(dtype).device(at::kMeta)),
    gradients);
}

} // namespace

std::vector<at::Tensor> run_shared(call_scope& call,
                                   const distributed_module& how,
                                   const void* object,
                                   std::span<const at::Tensor> xs) {
  return run_shared(call, how, object, xs, row_place{});
}

std::vector<at::Tensor>
run_shared(call_scope& call, const distributed_module& how, const void* object,
           std::span<const at::Tensor> xs, const row_place& place) {
  if (xs.empty()) // they share it by the samples of the first one
    refuse_shared_call();
  if (!call.looks()) [[likely]] {
    if (auto late = late_logits_of(call, how, xs))
      return {std::move(*late)};
    return how.forward_in_row(xs, place);
  }
  call.arguments(object, xs);
  auto result = how.forward(xs);
  call.results(result);
  return result;
}

void refuse_shared_call() {
  throw error{error_code::user_code,
              "ranks share this module, but not a call of it with such "
              "arguments: they have to be tensors, tuples or vectors of them, "
              "or all that the hooks of smp::tp_register take"};
}

} // namespace smp
