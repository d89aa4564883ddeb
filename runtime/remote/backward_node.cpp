#include "runtime/remote/backward_node.hpp"

#include "actors/protocol/request_number.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/remote/request_kind.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace smp {

namespace ag = torch::autograd;

remote_call_node::remote_call_node(remote_call_record x) : call_(std::move(x)) {
  // nop
}

std::string remote_call_node::name() const {
  return "smp::remote_call(" + call_.name + ")";
}

/// R16: only `distributed_model::backward`, in the microbatch of the call.
execution& remote_call_node::check() const {
  auto* ex = execution::current();
  auto refuse = [this](const char* why) -> execution& {
    throw error{error_code::unsupported,
                "backward through '" + call_.name + "' of rank "
                  + std::to_string(call_.owner.value) + ": " + why};
  };
  if (!ex || !ex->in_backward())
    return refuse("call model.backward(loss) inside the step; tensor."
                  "backward() and autograd::grad stop at rank borders");
  if (at::GradMode::is_enabled())
    return refuse("create_graph (higher derivatives) is not supported");
  if (ex->step() != call_.step || ex->microbatch() != call_.microbatch)
    return refuse("it was called in another step or microbatch");
  return *ex;
}

void remote_call_node::set_shapes(
  const std::vector<std::vector<int64_t>>& sizes) {
  for (size_t nr = 0; nr < call_.outputs.size(); ++nr) {
    auto& shape = mutable_input_metadata(nr).mutable_shape_as_dim_vector();
    shape.clear();
    for (auto x : sizes.at(call_.outputs[nr]))
      shape.emplace_back(x);
  }
}

std::vector<uint32_t> remote_call_node::reached(uint32_t nr) const {
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
remote_call_node::reached_by(const ag::variable_list& grads) const {
  std::vector<bool> result(call_.arguments.size());
  for (uint32_t nr = 0; nr < grads.size(); ++nr)
    if (grads[nr].defined())
      for (auto i : reached(nr))
        result[i] = true;
  return result;
}

ag::variable_list remote_call_node::apply(ag::variable_list&& grads) {
  auto& ex = check();
  auto defined = [](auto& x) { return x.defined(); };
  if (std::none_of(grads.begin(), grads.end(), defined))
    return ag::variable_list(call_.arguments.size());
  return call_.waits ? wait(ex, std::move(grads))
                     : promise(ex, std::move(grads));
}

remote_call_node::outgoing
remote_call_node::put(const ag::variable_list& grads, bool snapshot) const {
  outgoing result;
  result.table.resize(call_.num_outputs);
  for (size_t i = 0; i < grads.size(); ++i) {
    auto& entry = result.table[call_.outputs[i]];
    if (auto x = promised_value_of(grads[i])) {
      entry.what = wire_tensor::kind::object;
      entry.object = x->id();
      result.needs.push_back(x->id());
      x->tell(call_.owner);
      result.kept.push_back(std::move(x));
    } else {
      entry = put_data(result.body, materialise(grads[i]), snapshot);
    }
  }
  return result;
}

// -- wait for the gradients ---------------------------------------------------

namespace {

/// @param wanted the arguments whose gradients are asked for
/// @param pushed by wanted argument: its gradient comes with the answer
/// @param names what the owner calls the other gradients
std::vector<std::byte> encode_backward(execution& ex,
                                       const remote_call_record& x,
                                       const std::vector<wire_tensor>& table,
                                       const std::vector<size_t>& wanted,
                                       const std::vector<bool>& pushed,
                                       uint64_t names) {
  byte_writer out;
  out.u8(static_cast<uint8_t>(request_kind::backward));
  call_context::current().write(out);
  out.u64(x.id.origin.value);
  out.u32(call_number(x.id));
  out.boolean(ag::get_current_graph_task_keep_graph());
  out.boolean(!x.waits);
  write(out, table);
  out.u32(static_cast<uint32_t>(wanted.size()));
  for (size_t k = 0; k < wanted.size(); ++k) {
    out.u32(x.arguments[wanted[k]].position);
    out.boolean(pushed[k]);
  }
  out.u64(names);
  write_ids(out, ex.rank().model()->promises->take_releases(x.owner));
  return out.take();
}

call make_call(const remote_call_record& x, payload body) {
  call result;
  result.owner = x.owner;
  result.module = x.module;
  result.what = phase::backward;
  result.body = std::move(body);
  result.why = {"'" + x.name + "', backward", x.owner};
  return result;
}

} // namespace

ag::variable_list remote_call_node::wait(execution& ex,
                                         ag::variable_list grads) {
  ag::variable_list result(call_.arguments.size());
  auto x = put(grads, false);
  std::vector<size_t> wanted;
  for (size_t i = 0; i < call_.arguments.size(); ++i)
    if (task_should_compute_output(i))
      wanted.push_back(i);
  x.body.bytes = encode_backward(ex, call_, x.table, wanted,
                                 std::vector<bool>(wanted.size(), true), 0);
  auto c = make_call(call_, std::move(x.body));
  c.needs = std::move(x.needs);
  auto answer = ex.park(std::move(c));
  byte_reader in{answer.body.bytes};
  auto back = read_table(in);
  in.expect_end();
  if (back.size() != wanted.size())
    throw error{error_code::protocol, "backward of '" + call_.name + "': "
                                        + std::to_string(back.size())
                                        + " gradients instead of "
                                        + std::to_string(wanted.size())};
  for (size_t i = 0; i < wanted.size(); ++i)
    if (back[i].what == wire_tensor::kind::data)
      result[wanted[i]] = take_data(answer.body, back[i]);
  return result;
}

// -- go on without them -------------------------------------------------------

ag::variable_list remote_call_node::promise(execution& ex,
                                            ag::variable_list grads) {
  auto& book = *ex.rank().model()->promises;
  auto request = std::make_shared<promised_request>();
  request->owner = call_.owner;
  request->module = call_.module;
  request->name = call_.name;
  request->number = book.next_request(ex);
  request->why = {"'" + call_.name + "', backward", call_.owner};
  // Copies: this rank goes on and may add to them.
  auto x = put(grads, true);
  request->arguments = std::move(x.kept);
  // What is not reached has no gradient, as in one process.
  auto reached = reached_by(grads);
  std::vector<size_t> wanted;
  for (size_t i = 0; i < call_.arguments.size(); ++i)
    if (reached[i] && task_should_compute_output(i))
      wanted.push_back(i);
  // Nodes that only hand gradients on would take a promise into the
  // accumulation of a leaf, under a lock that other microbatches want.
  for (auto i : wanted) {
    auto* next = next_edge(i).function.get();
    request->pushed.push_back(!dynamic_cast<remote_call_node*>(next));
  }
  auto names = book.next_names(wanted.size());
  x.body.bytes
    = encode_backward(ex, call_, x.table, wanted, request->pushed, names);
  auto c = make_call(call_, std::move(x.body));
  c.needs = std::move(x.needs);
  send_promise(ex, std::move(c), request,
               [to = std::weak_ptr{request}](const payload& answer) {
                 to.lock()->take_contents(answer);
               });
  ag::variable_list result(call_.arguments.size());
  std::vector<at::Tensor> now;
  for (size_t k = 0; k < wanted.size(); ++k) {
    auto& argument = call_.arguments[wanted[k]];
    auto& sizes = argument.from ? argument.from->sizes.at(argument.output)
                                : argument.sizes;
    object_id id{call_.owner, names + k,
                 static_cast<uint32_t>(call_.step.value)};
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
