#include "runtime/remote_call.hpp"

#include "actors/request_number.hpp"
#include "runtime/call_context.hpp"
#include "runtime/engine.hpp"
#include "runtime/execution.hpp"
#include "runtime/model_state.hpp"
#include "runtime/released.hpp"
#include "runtime/wire_ops.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/ops/zeros_like.h>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// What a remote call left at its owner, seen from the caller.
struct call_record {
  rank_id owner;
  module_id module;
  std::string name;
  request_id id;
  step_id step;
  microbatch_id microbatch;
  /// Per edge of the node: position of the argument.
  std::vector<uint32_t> arguments;
  /// Per input of the node: position of the output.
  std::vector<uint32_t> outputs;
  uint32_t num_outputs = 0;
};

execution& executing(const std::string& what) {
  if (auto* ex = execution::current())
    return *ex;
  throw error{error_code::unsupported,
              what + " lives on another rank: it can be called inside a step "
                     "(smp::step) only"};
}

/// Backward of a remote call: asks the owner, which kept its graph (R3).
class remote_call_node : public ag::Node {
public:
  explicit remote_call_node(call_record x) : call_(std::move(x)) {
    // nop
  }

  std::string name() const override {
    return "smp::remote_call(" + call_.name + ")";
  }

  void release_variables() override {
    // nop: the owner drops its side with the backward (R3)
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    auto& ex = check();
    ag::variable_list result(call_.arguments.size());
    payload body;
    wire_table table(call_.num_outputs);
    auto any = false;
    for (size_t i = 0; i < grads.size(); ++i) {
      any = any || grads[i].defined();
      table[call_.outputs[i]] = put_data(body, materialise(grads[i]), false);
    }
    if (!any)
      return result;
    std::vector<size_t> wanted;
    for (size_t i = 0; i < call_.arguments.size(); ++i)
      if (task_should_compute_output(i))
        wanted.push_back(i);
    byte_writer out;
    out.u8(static_cast<uint8_t>(wire_op::backward));
    call_context::current().write(out);
    out.u64(call_.id.origin.value);
    out.u32(call_number(call_.id));
    out.boolean(ag::get_current_graph_task_keep_graph());
    write(out, table);
    out.u32(static_cast<uint32_t>(wanted.size()));
    for (auto i : wanted)
      out.u32(call_.arguments[i]);
    body.bytes = out.take();
    call c;
    c.owner = call_.owner;
    c.module = call_.module;
    c.what = phase::backward;
    c.body = std::move(body);
    c.why = {"'" + call_.name + "', backward", call_.owner};
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

private:
  /// R16: only `distributed_model::backward`, in the microbatch of the call.
  execution& check() const {
    auto* ex = execution::current();
    auto refuse = [this](const char* why) -> execution& {
      throw error{error_code::unsupported,
                  "backward through '" + call_.name + "' of rank "
                    + std::to_string(call_.owner.value) + ": " + why};
    };
    if (!ex || !ex->in_backward)
      return refuse("call model.backward(loss) inside the step; tensor."
                    "backward() and autograd::grad stop at rank borders");
    if (at::GradMode::is_enabled())
      return refuse("create_graph (higher derivatives) is not supported");
    if (ex->step != call_.step || ex->microbatch != call_.microbatch)
      return refuse("it was called in another step or microbatch");
    return *ex;
  }

  call_record call_;
};

wire_tensor put_argument(payload& out, const model_state& st,
                         const at::Tensor& x) {
  if (auto i = st.model().find(x);
      i >= 0 && (is_released(x) || !st.model().tensors[i].is_buffer)) {
    // A parameter stays with its owner (R14), and so does what is elsewhere
    // anyway.
    wire_tensor result;
    result.what = wire_tensor::kind::parameter;
    result.index = static_cast<uint32_t>(i);
    result.requires_grad = x.requires_grad();
    return result;
  }
  return put_data(out, x, st.shares_state(x));
}

void write_back(const at::Tensor& argument, const at::Tensor& content,
                const std::string& name, uint32_t position) {
  if (at::GradMode::is_enabled() && argument.is_leaf()
      && argument.requires_grad())
    throw error{error_code::unsupported,
                "'" + name + "' changes its tensor argument "
                  + std::to_string(position)
                  + " in place, a leaf that requires grad: give it a clone"};
  argument.copy_(content);
}

} // namespace

void fail_call(module_id module, const error& err) {
  auto cause = err.cause();
  auto* s = session::current_or_null();
  if (auto st = s ? s->internals().model() : nullptr)
    cause.text = "call of '" + st->name(module) + "': " + cause.text;
  throw error{std::move(cause)};
}

call_result call_remote(rank_id owner, module_id module, const call_target& x,
                        const packer& in, std::vector<value> args) {
  auto* s = session::current_or_null();
  auto st = s ? s->internals().model() : nullptr;
  if (!st)
    throw error{error_code::unsupported, "a module of a model whose session "
                                         "ended is called"};
  auto name = st->name(module);
  if (x.op == wire_op::range || x.op == wire_op::method_range)
    name += "[" + std::to_string(x.first) + ":" + std::to_string(x.last) + "]";
  auto& ex = executing("module '" + name + "'");
  st->flush();
  auto& arguments = in.tensors();
  payload body;
  wire_table table;
  for (auto& t : arguments)
    table.push_back(put_argument(body, *st, t));
  byte_writer out;
  out.u8(static_cast<uint8_t>(x.op));
  out.u32(x.first);
  out.u32(x.last);
  out.u8(static_cast<uint8_t>(x.hold ? wire_results::hold
                                     : wire_results::push));
  out.u64(++ex.calls);
  call_context::current().write(out);
  out.boolean(x.training);
  out.u64(x.invoker);
  out.string(x.name);
  write_stream(out, body, ex);
  write(out, value::tuple(std::move(args)));
  write(out, table);
  body.bytes = out.take();
  call c;
  c.owner = owner;
  c.module = module;
  c.body = std::move(body);
  c.why = {"'" + name + "', forward", owner};
  auto answer = ex.park(std::move(c));
  // -- results ----------------------------------------------------------------
  byte_reader reader{answer.body.bytes};
  read_stream(reader, answer.body, ex);
  auto result = read_value(reader);
  auto changed = read_value(reader);
  auto results = read_table(reader);
  std::vector<std::pair<uint32_t, uint32_t>> written(
    reader.count(8, "written arguments"));
  for (auto& [argument, content] : written) {
    argument = reader.u32("written argument");
    content = reader.u32("written content");
  }
  reader.expect_end();
  auto check_index = [&](uint32_t i, size_t n, const char* what) {
    if (i >= n)
      throw error{error_code::protocol, "answer of '" + name + "': " + what
                                          + " " + std::to_string(i)
                                          + " does not exist"};
  };
  std::vector<at::Tensor> tensors(results.size());
  call_record record{owner, module, name, answer.id, ex.step, ex.microbatch,
                     {},    {},     static_cast<uint32_t>(results.size())};
  auto with_gradient = false;
  for (size_t i = 0; i < results.size(); ++i) {
    auto& t = results[i];
    switch (t.what) {
      case wire_tensor::kind::undefined:
        break;
      case wire_tensor::kind::data:
        tensors[i] = take_data(answer.body, t);
        with_gradient = with_gradient || t.requires_grad;
        break;
      case wire_tensor::kind::object:
        tensors[i] = s->internals().objects().fetch(t.object).detach();
        s->internals().objects().release({t.object});
        with_gradient = with_gradient || t.requires_grad;
        break;
      case wire_tensor::kind::argument:
        check_index(t.index, arguments.size(), "argument");
        tensors[i] = arguments[t.index];
        break;
      case wire_tensor::kind::parameter:
        check_index(t.index, st->model().tensors.size(), "parameter");
        tensors[i] = st->model().tensors[t.index].tensor;
        break;
    }
  }
  if (with_gradient && at::GradMode::is_enabled()) {
    // An own node, made only if an output has a gradient, with edges only for
    // arguments that have one (R10).
    ag::edge_list edges;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (table[i].what == wire_tensor::kind::data && table[i].requires_grad) {
        edges.push_back(ag::impl::gradient_edge(arguments[i]));
        record.arguments.push_back(static_cast<uint32_t>(i));
      }
    }
    std::vector<std::pair<size_t, uint32_t>> outputs;
    for (size_t i = 0; i < results.size(); ++i) {
      auto travelled = results[i].what == wire_tensor::kind::data
                       || results[i].what == wire_tensor::kind::object;
      if (travelled && results[i].requires_grad) {
        outputs.emplace_back(i, static_cast<uint32_t>(record.outputs.size()));
        record.outputs.push_back(static_cast<uint32_t>(i));
      }
    }
    auto node = std::shared_ptr<ag::Node>(
      new remote_call_node(std::move(record)), ag::deleteNode);
    node->set_next_edges(std::move(edges));
    for (auto& [i, nr] : outputs) {
      node->add_input_metadata(tensors[i]);
      ag::impl::set_gradient_edge(tensors[i], {node, nr});
    }
  }
  for (auto& [argument, content] : written) {
    check_index(argument, arguments.size(), "argument");
    check_index(content, tensors.size(), "content");
    write_back(arguments[argument], tensors[content], name, argument);
  }
  call_result r{std::move(result), {}, unpacker{std::move(tensors)}};
  if (auto* list = changed.get_if<dict_value>())
    for (auto& [position, content] : list->items)
      if (auto* i = position.get_if<int64_t>())
        r.changed.emplace_back(static_cast<uint32_t>(*i), std::move(content));
  return r;
}

} // namespace smp
