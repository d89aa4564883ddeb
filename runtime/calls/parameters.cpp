#include "runtime/calls/parameters.hpp"

#include "actors/order/order_book.hpp"
#include "actors/server/executor.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <optional>

namespace smp {

namespace {

namespace ag = torch::autograd;

request_head about(request_kind what, uint32_t tensor) {
  request_head result;
  result.what = what;
  result.tensor = tensor;
  return result;
}

/// Sends the gradient of another rank's parameter to its owner (R14): every
/// consumer of the parameter, or of a copy, passes its gradient here.
class remote_parameter_gradient : public ag::Node {
public:
  remote_parameter_gradient(rank_id owner, module_id module, uint32_t tensor,
                            std::string name, at::Tensor parameter)
    // Runs as soon as it is ready, like the node that accumulates a leaf's
    // gradient: a sequence number of this thread would order it at random.
    : Node(std::numeric_limits<uint64_t>::max()),
      owner_(owner),
      module_(module),
      tensor_(tensor),
      name_(std::move(name)),
      parameter_(std::move(parameter)) {
    // nop
  }

  std::string name() const override {
    return "smp::remote_parameter_gradient(" + name_ + ")";
  }

  void release_variables() override {
    // nop
  }

  /// The user's hooks on the parameter.
  std::vector<std::unique_ptr<ag::FunctionPreHook>>&
  tensor_pre_hooks() noexcept override {
    return ag::impl::hooks(parameter_);
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    if (!grads[0].defined())
      return {};
    auto* ex = running_call::current();
    auto refuse = [this](const char* why) {
      throw error{error_code::unsupported,
                  "gradient of '" + name_ + "', which rank "
                    + std::to_string(owner_.value) + " owns: " + why};
    };
    if (!ex || !ex->in_backward())
      refuse("call model.backward(loss) inside the step");
    if (at::GradMode::is_enabled())
      refuse("create_graph (higher derivatives) is not supported");
    parameter_request asked{about(request_kind::add_gradient, tensor_),
                            to_tensor_ref(materialise(grads[0]), false)};
    ex->executor().park(remote_call(owner_, module_, phase::backward,
                                    to_payload(asked),
                                    {"gradient of '" + name_ + "'", owner_}));
    return {};
  }

private:
  rank_id owner_;
  module_id module_;
  uint32_t tensor_;
  std::string name_;
  at::Tensor parameter_;
};

} // namespace

remote_parameters::remote_parameters(const rank_context& rank,
                                     const model_map& map,
                                     const promise_book& promises)
  : rank_(rank), map_(map), promises_(promises) {
  // nop
}

remote_parameters::~remote_parameters() = default;

void remote_parameters::replace(uint32_t tensor) {
  auto& t = map_.model().tensors[tensor].tensor;
  std::shared_ptr<ag::Node> gradient;
  // A parameter that is frozen now may require grad later.
  if (ag::isDifferentiableType(t.scalar_type())) {
    gradient = {new remote_parameter_gradient(map_.tensor_owner(tensor),
                                              map_.home(tensor), tensor,
                                              map_.tensor_name(tensor), t),
                ag::deleteNode};
    gradients_.push_back(gradient);
  }
  make_placeholder(t, gradient);
}

// -- placeholder_source -------------------------------------------------------

uint32_t remote_parameters::position(const at::Tensor& x) const {
  auto result = map_.model().find(x);
  if (result < 0)
    throw error{error_code::unsupported,
                "`.data` of a parameter that another rank owns, or a tensor of "
                "another model, is used: read the parameter itself"};
  return static_cast<uint32_t>(result);
}

bool remote_parameters::is_buffer(uint32_t tensor) const {
  return map_.model().tensors[tensor].is_buffer;
}

void remote_parameters::refuse_write(uint32_t tensor,
                                     const std::string& op) const {
  auto* ex = running_call::current();
  throw error{failure{error_code::unsupported, rank_.self(),
                      ex ? ex->module_path() : std::string{},
                      "in-place " + op + " changes '" + map_.tensor_name(tensor)
                        + "', which rank "
                        + std::to_string(map_.tensor_owner(tensor).value)
                        + " owns; change it inside the module that owns it"}};
}

bool remote_parameters::run_at_owner(const c10::OperatorHandle& op,
                                     torch::jit::Stack& stack) {
  return add_remotely(op, stack);
}

running_call& remote_parameters::executing(uint32_t tensor) const {
  if (auto* ex = running_call::current())
    return *ex;
  throw error{error_code::unsupported,
              "'" + map_.tensor_name(tensor)
                + "' is used outside a step, but rank "
                + std::to_string(map_.tensor_owner(tensor).value)
                + " owns it; use model.state_dict()"};
}

call remote_parameters::ask(const parameter_request& x,
                            const char* what) const {
  auto tensor = x.head.tensor;
  auto owner = map_.tensor_owner(tensor);
  return remote_call(
    owner, map_.home(tensor),
    executing(tensor).in_backward() ? phase::backward : phase::forward,
    to_payload(x),
    {std::string{what} + " of '" + map_.tensor_name(tensor) + "'", owner});
}

at::Tensor remote_parameters::fetch(uint32_t tensor) {
  auto& t = map_.model().tensors.at(tensor);
  auto& ex = executing(tensor);
  flush();
  auto anew = t.is_buffer
              || map_.order().changing_parameters().contains(tensor);
  if (anew)
    ex.note_state();
  // A computed order knows requests, but not which execution waits for the
  // fetch of another microbatch: it could make that one wait for this one.
  auto alone = anew || rank_.records().fixed_order()
               || (promises_.on() && rank_.records().active());
  std::pair key{tensor, alone ? ex.id() : request_id{}};
  auto c = ask({about(request_kind::read_tensor, tensor), {}}, "value");
  // A copy fetched for one microbatch serves others, which may need its graph.
  std::optional<c10::InferenceMode> off;
  if (c10::InferenceMode::is_enabled())
    off.emplace(false);
  std::shared_ptr<awaited<at::Tensor>> mine;
  if (!anew) {
    // One fetch per step, however many microbatches need it.
    std::unique_lock guard{mutex_};
    auto& known = copies_[key];
    if (known.value) {
      auto other = known.value;
      guard.unlock();
      return awaited<at::Tensor>::peek(other, c.why);
    }
    known.value = mine = std::make_shared<awaited<at::Tensor>>();
  }
  try {
    auto answer = ex.executor().park(std::move(c));
    auto result = to_tensor(
      from_payload<parameter_reply>(answer.body, "reply").value);
    // Placeholders have their own node, which knows the owner.
    if (t.tensor.requires_grad())
      ag::impl::set_gradient_edge(result, ag::impl::gradient_edge(t.tensor));
    if (!t.is_buffer) {
      std::lock_guard guard{mutex_};
      auto& known = copies_[key];
      known.known = result;
      known.version = result._version();
    }
    if (mine)
      mine->set_value(result);
    return result;
  } catch (const error& err) {
    if (mine)
      mine->fail(err.cause());
    throw;
  }
}

void remote_parameters::store(uint32_t tensor, const at::Tensor& x) {
  auto& ex = executing(tensor);
  if (ex.pass().what == recompute_pass::kind::again)
    return; // written in the first pass
  ex.note_state();
  ex.executor().park(ask({about(request_kind::write_tensor, tensor),
                          to_tensor_ref(x.detach(), true)},
                         "new value"));
}

void remote_parameters::lend(uint32_t tensor, const at::Tensor& copy) {
  executing(tensor).add_lent({tensor, copy, copy.detach().clone()});
}

void remote_parameters::flush() {
  auto* ex = running_call::current();
  if (!ex)
    return;
  for (auto& x : ex->take_lent()) {
    // The version proves nothing: batch norm changes statistics without it.
    if (!at::equal(x.copy.detach(), x.content)) {
      x.content = x.copy.detach().clone();
      store(x.tensor, x.content);
    }
    if (x.copy.storage().use_count() > 1)
      ex->add_lent(std::move(x));
  }
  std::unique_lock guard{mutex_};
  for (auto& [key, x] : copies_)
    if (x.known.defined() && x.known._version() != x.version)
      throw error{failure{
        error_code::unsupported, rank_.self(), ex->module_path(),
        "changes a view of '" + map_.tensor_name(key.first) + "', which rank "
          + std::to_string(map_.tensor_owner(key.first).value)
          + " owns; change it inside the module that owns "
            "it"}};
}

// -- steps --------------------------------------------------------------------

void remote_parameters::end_step() {
  std::unique_lock guard{mutex_};
  copies_.clear();
}

} // namespace smp
