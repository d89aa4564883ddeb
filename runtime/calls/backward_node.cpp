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
  return "smp::remote_call(" + call_.name + ")";
}

/// R16: only `distributed_model::backward`, in the microbatch of the call.
running_call& backward_node::check() const {
  auto* ex = running_call::current();
  auto refuse = [this](const char* why) -> running_call& {
    throw error{error_code::unsupported,
                "backward through '" + call_.name + "' of rank "
                  + std::to_string(call_.owner.value) + ": " + why};
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

void backward_node::set_shapes(const std::vector<std::vector<int64_t>>& sizes) {
  for (size_t nr = 0; nr < call_.outputs.size(); ++nr) {
    auto& shape = mutable_input_metadata(nr).mutable_shape_as_dim_vector();
    shape.clear();
    for (auto x : sizes.at(call_.outputs[nr]))
      shape.emplace_back(x);
  }
}

std::vector<uint32_t> backward_node::reached(uint32_t nr) const {
  auto& all = call_.promise ? call_.promise->reaches : call_.reaches;
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

std::vector<bool>
backward_node::reached_by(const ag::variable_list& grads) const {
  std::vector<bool> result(call_.arguments.size());
  for (uint32_t nr = 0; nr < grads.size(); ++nr)
    if (grads[nr].defined())
      for (auto i : reached(nr))
        result[i] = true;
  return result;
}

ag::variable_list backward_node::apply(ag::variable_list&& grads) {
  auto& ex = check();
  auto defined = [](auto& x) { return x.defined(); };
  if (std::none_of(grads.begin(), grads.end(), defined))
    return ag::variable_list(call_.arguments.size());
  // Even if its forward waited: that one waited only to learn.
  auto known = ex.rank().model()->promises->recorded(ex);
  auto waits = known ? known->kind == call_kind::remote : call_.waits;
  return waits ? wait(ex, std::move(grads)) : promise(ex, std::move(grads));
}

backward_node::outgoing backward_node::put(const ag::variable_list& grads,
                                           bool snapshot) const {
  outgoing result;
  auto& gradients = result.asked.gradients;
  gradients.resize(call_.num_outputs);
  for (size_t i = 0; i < grads.size(); ++i) {
    auto& entry = gradients[call_.outputs[i]];
    if (auto x = promised_value_of(grads[i])) {
      entry = remote_tensor::needed(static_cast<uint32_t>(result.needs.size()),
                                    false);
      result.needs.push_back(x->id());
      x->tell(call_.owner);
      result.kept.push_back(std::move(x));
    } else {
      entry = remote_tensor::of(materialise(grads[i]), snapshot);
    }
  }
  return result;
}

/// @param wanted positions of the arguments whose gradients are requested
/// @param pushed by wanted argument: its gradient comes with the reply
call backward_node::make_call(running_call& ex, outgoing x,
                              const std::vector<size_t>& wanted,
                              const std::vector<bool>& pushed) const {
  auto& asked = x.asked;
  asked.context = call_context::current();
  asked.origin = call_.id.origin;
  asked.call = call_number(call_.id);
  asked.keep_graph = ag::get_current_graph_task_keep_graph();
  for (size_t k = 0; k < wanted.size(); ++k)
    asked.wanted.push_back({call_.arguments[wanted[k]].position, pushed[k]});
  auto result = remote_call(
    call_.owner, call_.module, phase::backward, to_payload(asked),
    answer_of(call_.name, phase::backward, call_.owner));
  result.released = ex.rank().model()->promises->take_releases(call_.owner);
  result.needs = std::move(x.needs);
  return result;
}

// -- wait for the gradients ---------------------------------------------------

ag::variable_list backward_node::wait(running_call& ex,
                                      ag::variable_list grads) {
  ag::variable_list result(call_.arguments.size());
  std::vector<size_t> wanted;
  for (size_t i = 0; i < call_.arguments.size(); ++i)
    if (task_should_compute_output(i))
      wanted.push_back(i);
  auto answer = ex.park(make_call(ex, put(grads, false), wanted,
                                  std::vector<bool>(wanted.size(), true)));
  auto back = from_payload<backward_reply>(answer.body, "reply").gradients;
  if (back.size() != wanted.size())
    throw error{error_code::protocol, "backward of '" + call_.name
                                        + "': " + std::to_string(back.size())
                                        + " gradients instead of "
                                        + std::to_string(wanted.size())};
  for (size_t i = 0; i < wanted.size(); ++i)
    if (back[i].what != remote_tensor::kind::undefined)
      result[wanted[i]] = back[i].tensor();
  return result;
}

// -- go on without them -------------------------------------------------------

ag::variable_list backward_node::promise(running_call& ex,
                                         ag::variable_list grads) {
  auto& book = *ex.rank().model()->promises;
  auto request = std::make_shared<promised_request>();
  request->owner = call_.owner;
  request->module = call_.module;
  request->name = call_.name;
  request->number = book.next_request(ex);
  request->why = answer_of(call_.name, phase::backward, call_.owner);
  request->why.asks = request->number;
  // Snapshot: this rank continues and may add to the gradients.
  auto x = put(grads, true);
  request->arguments = std::move(x.kept);
  // An argument that is not reached has no gradient, as in one process.
  auto reached = reached_by(grads);
  std::vector<size_t> wanted;
  for (size_t i = 0; i < call_.arguments.size(); ++i)
    if (reached[i] && task_should_compute_output(i))
      wanted.push_back(i);
  // Other nodes would take a promise into the accumulation of a leaf, which
  // waits under a lock that other microbatches need.
  for (auto i : wanted) {
    auto* next = next_edge(i).function.get();
    request->pushed.push_back(!dynamic_cast<backward_node*>(next));
  }
  x.asked.promised = true;
  auto c = make_call(ex, std::move(x), wanted, request->pushed);
  send_promise(ex, promise_call(std::move(c)), request);
  ag::variable_list result(call_.arguments.size());
  std::vector<at::Tensor> now;
  for (size_t k = 0; k < wanted.size(); ++k) {
    auto& argument = call_.arguments[wanted[k]];
    auto& sizes = argument.from ? argument.from->sizes.at(argument.output)
                                : argument.sizes;
    auto id = result_name(call_.owner, {ex.rank().self(), request->number},
                          call_.step, k);
    auto value = std::make_shared<promised_value>(
      ex.rank(), request, static_cast<uint32_t>(k), id,
      prediction::tensor{argument.dtype, false,
                         static_cast<int64_t>(sizes.size())});
    auto& grad = result[wanted[k]];
    grad = make_promise(std::move(value), argument.dtype, &sizes);
    if (request->pushed[k])
      now.push_back(grad);
  }
  keep_promises(now);
  return result;
}

} // namespace smp
