#include "runtime/calls/backward_node.hpp"

#include "actors/order/order_book.hpp"
#include "actors/protocol/result_name.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/named_results.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/placeholder.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace smp {

namespace ag = torch::autograd;

backward_node::backward_node(sent_call x) : call_(std::move(x)) {
  // nop
}

std::string backward_node::name() const {
  return "smp::remote_call(" + call_.request->name + ")";
}

/// R16: only `distributed_model::backward`, in the microbatch of the call.
running_call& backward_node::check() const {
  auto* ex = running_call::current();
  auto refuse = [this](const char* why) -> running_call& {
    throw error{error_code::unsupported,
                "backward through '" + call_.request->name + "' of rank "
                  + std::to_string(call_.request->owner.value) + ": " + why};
  };
  if (!ex || !ex->in_backward())
    return refuse(
      "call model.backward(loss) inside the step; tensor."
      "backward() and autograd::grad stop at rank borders");
  if (at::GradMode::is_enabled())
    return refuse("create_graph (higher derivatives) is not supported");
  if (ex->step() != call_.step || ex->microbatch() != call_.microbatch)
    return refuse("it was called in another step or microbatch");
  return *ex;
}

void backward_node::set_shapes(const std::vector<tensor_meta>& results) {
  for (size_t nr = 0; nr < call_.outputs.size(); ++nr) {
    auto& shape = mutable_input_metadata(nr).mutable_shape_as_dim_vector();
    shape.clear();
    for (auto x : results.at(call_.outputs[nr]).shape)
      shape.emplace_back(x);
  }
}

std::vector<uint32_t> backward_node::reached(uint32_t nr) const {
  // Empty if the owner did not report it.
  auto& all = call_.request->reaches;
  std::vector<uint32_t> result;
  for (uint32_t i = 0; i < call_.arguments.size(); ++i) {
    auto position = call_.arguments[i].position;
    auto out = call_.outputs.at(nr);
    if (out >= all.size()
        || std::find(all[out].begin(), all[out].end(), position)
             != all[out].end())
      result.push_back(i);
  }
  return result;
}

/// @returns the edges whose gradients are needed. An argument that is not
/// reached has no gradient, as in one process.
std::vector<size_t>
backward_node::wanted(const ag::variable_list& grads) const {
  std::vector<bool> reaches(call_.arguments.size());
  for (uint32_t nr = 0; nr < grads.size(); ++nr)
    if (grads[nr].defined())
      for (auto i : reached(nr))
        reaches[i] = true;
  std::vector<size_t> result;
  for (size_t i = 0; i < reaches.size(); ++i)
    if (reaches[i] && task_should_compute_output(i))
      result.push_back(i);
  return result;
}

/// @param request gets what the call names and must stay alive until the reply
call backward_node::make_call(running_call& ex, const ag::variable_list& grads,
                              const std::vector<size_t>& wanted, bool waits,
                              sent_request& request) const {
  backward_request asked;
  std::vector<object_id> needs;
  asked.context = call_context::current();
  asked.origin = call_.id.origin;
  asked.call = call_number(call_.id);
  asked.keep_graph = ag::get_current_graph_task_keep_graph();
  asked.promised = !waits;
  asked.gradients.resize(call_.num_outputs);
  for (size_t i = 0; i < grads.size(); ++i) {
    auto& entry = asked.gradients[call_.outputs[i]];
    if (auto x = promised_value_of(grads[i])) {
      entry = remote_tensor::needed(static_cast<uint32_t>(needs.size()), false);
      needs.push_back(x->id());
      x->tell(request.owner);
      request.arguments.push_back(std::move(x));
    } else {
      // This rank may add to the gradient if it goes on.
      entry = remote_tensor::of(materialise(grads[i]), !waits);
    }
  }
  for (size_t k = 0; k < wanted.size(); ++k)
    asked.wanted.push_back(
      {call_.arguments[wanted[k]].position, request.pushed[k]});
  auto result = remote_call(request.owner, request.module, phase::backward,
                            to_payload(asked), request.why);
  if (!waits)
    result = promise_call(std::move(result));
  result.released = ex.rank().model()->promises->take_releases(request.owner,
                                                               ex.step());
  result.needs = std::move(needs);
  return result;
}

at::Tensor backward_node::promise(const running_call& ex,
                                  const sent_request_ptr& request,
                                  uint32_t position,
                                  const sent_call::argument& x) const {
  auto what = x.gradient;
  if (x.from)
    what.shape = x.from->results.at(x.output).shape;
  auto id = result_name(request->owner, {ex.rank().self(), request->number},
                        call_.step, position);
  auto value = std::make_shared<promised_value>(ex.rank(), request, position,
                                                id, what);
  return make_promise(std::move(value), static_cast<at::ScalarType>(what.dtype),
                      &what.shape, device_here(what));
}

ag::variable_list backward_node::apply(ag::variable_list&& grads) {
  auto& ex = check();
  ag::variable_list result(call_.arguments.size());
  auto defined = [](auto& x) { return x.defined(); };
  if (std::none_of(grads.begin(), grads.end(), defined))
    return result;
  auto& book = *ex.rank().model()->promises;
  // Even if its forward waited: that one waited only to learn.
  auto known = book.recorded(ex);
  auto waits = known ? known->kind == call_kind::remote : call_.waits;
  auto needed = wanted(grads);
  auto request = std::make_shared<sent_request>();
  request->owner = call_.request->owner;
  request->module = call_.request->module;
  request->name = call_.request->name;
  request->why = answer_of(request->name, phase::backward, request->owner);
  // Other nodes would take a promise into the accumulation of a leaf, which
  // waits under a lock that other microbatches need.
  for (auto i : needed) {
    auto* next = next_edge(i).function.get();
    request->pushed.push_back(waits
                              || dynamic_cast<backward_node*>(next) == nullptr);
  }
  if (!waits)
    request->number = book.next_request(ex);
  auto c = make_call(ex, grads, needed, waits, *request);
  grads.clear();
  send(ex, std::move(c), request);
  std::vector<at::Tensor> now;
  for (uint32_t k = 0; k < needed.size(); ++k) {
    auto& grad = result[needed[k]];
    if (waits) {
      grad = std::move(request->contents[k]);
      continue;
    }
    grad = promise(ex, request, k, call_.arguments[needed[k]]);
    if (request->pushed[k])
      now.push_back(grad);
  }
  keep_promises(now);
  return result;
}

} // namespace smp
