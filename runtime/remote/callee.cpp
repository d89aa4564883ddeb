#include "runtime/remote/callee.hpp"

#include "actors/protocol/request_number.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/remote/promised_call.hpp"
#include "runtime/remote/reached_arguments.hpp"
#include "runtime/remote/caller.hpp"
#include "runtime/remote/entered_modules.hpp"
#include "runtime/remote/module_runner.hpp"
#include "runtime/remote/object_store.hpp"
#include "runtime/remote/parameters.hpp"
#include "runtime/remote/saved_calls.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "runtime/remote/request_kind.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// Passes gradients on unchanged.
struct identity_node : ag::Node {
  std::string name() const override {
    return "smp::argument";
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    return std::move(grads);
  }
};

/// A module may write into its argument, which neither a leaf nor a view of
/// one allows: it gets a tensor of its own over the same bytes, which nobody
/// else uses, with one autograd node between (R11). Copy on write (R40) would
/// do as well, but takes no memory that the fabric allocated.
at::Tensor behind_identity(const at::Tensor& leaf) {
  auto result = leaf.variable_data();
  auto node = std::shared_ptr<ag::Node>(new identity_node, ag::deleteNode);
  node->set_next_edges({ag::impl::gradient_edge(leaf)});
  auto nr = node->add_input_metadata(result);
  ag::impl::set_gradient_edge(result, {node, nr});
  return result;
}

/// The arguments of a call as its module gets them.
struct arrived {
  /// Where their gradients come out; undefined where none is wanted.
  std::vector<at::Tensor> leaves;
  /// What the module gets.
  std::vector<at::Tensor> tensors;
  std::vector<uint32_t> versions;
};

/// @param shared the call does not write to its arguments, or fails: what this
/// rank holds itself needs no copy
arrived take_arguments(const execution& ex, const payload& body,
                       const wire_table& table, bool grad, bool shared) {
  auto& model = ex.rank().model()->map->model();
  arrived result;
  result.leaves.resize(table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    auto& x = table[i];
    at::Tensor t;
    switch (x.what) {
      case wire_tensor::kind::undefined:
        break;
      case wire_tensor::kind::data:
        t = take_data(body, x);
        break;
      case wire_tensor::kind::object:
        t = ex.rank().objects().fetch(x.object).detach();
        t = shared && !t.is_inference() ? t.variable_data() : t.clone();
        break;
      case wire_tensor::kind::parameter:
        if (x.index >= model.tensors.size())
          throw error{error_code::protocol, "unknown parameter in a request"};
        t = model.tensors[x.index].tensor;
        break;
      case wire_tensor::kind::argument:
        throw error{error_code::protocol, "an argument names itself"};
    }
    auto came = x.what == wire_tensor::kind::data
                || x.what == wire_tensor::kind::object;
    if (SMP_FAULT("transposed-argument") && came && t.dim() > 1)
      t = t.transpose(-2, -1).contiguous().view(t.sizes());
    if (came && x.requires_grad && grad) {
      t.set_requires_grad(true);
      result.leaves[i] = t;
      t = behind_identity(t);
    }
    result.versions.push_back(t.defined() ? t._version() : 0);
    result.tensors.push_back(std::move(t));
  }
  return result;
}

/// Runs a call or range and encodes its results; keeps what backward needs.
class forward_call {
public:
  forward_call(execution& ex, const request& req)
    : ex_(ex), req_(req), model_(*ex.rank().model()), map_(*model_.map) {
    // nop
  }

  payload run(request_kind op, byte_reader& in) {
    call_target target;
    target.op = op;
    target.first = in.u32("first child");
    target.last = in.u32("last child");
    auto results = in.u8("where results stay");
    if (results > static_cast<uint8_t>(wire_results::promise))
      in.fail("where results stay", "unknown");
    hold_ = results == static_cast<uint8_t>(wire_results::hold);
    promised_ = results == static_cast<uint8_t>(wire_results::promise);
    in.u64("call number");
    auto context = call_context::read(in);
    target.training = in.boolean("training");
    target.invoker = in.u64("invoker");
    target.name = in.string("method or attribute");
    read_stream(in, req_.body, ex_);
    auto args = read_value(in);
    auto* list = args.get_if<tuple_value>();
    if (!list)
      in.fail("arguments", "no tuple");
    auto table = read_table(in);
    if (promised_)
      read_expected(in);
    ex_.rank().objects().drop(read_ids(in));
    in.expect_end();
    // Outside of inference mode, where nothing tells that an argument was
    // written (R12).
    auto arguments = take_arguments(ex_, req_.body, table, context.grad,
                                    promised_);
    check_indexes(args, table.size());
    scoped_context inside{context};
    auto before = random_stream::of_default();
    auto stale = SMP_FAULT("stale-buffer") ? copies_of_buffers() : buffers{};
    packer out;
    unpacker tensors{arguments.tensors};
    auto done = invoke(target, tensors, list->items, out);
    model_.parameters->flush();
    for (auto& [buffer, old] : stale)
      buffer.variable_data().copy_(old); // autograd sees no change
    if (!entered_modules(map_, req_).empty()
        || !(random_stream::of_default() == before))
      ex_.note_state();
    // What it called is known with its answers.
    fence(ex_);
    if (promised_)
      return keep_promise(table, arguments, out, done);
    return answer(table, arguments, out, std::move(done), before);
  }

private:
  using buffers = std::vector<std::pair<at::Tensor, at::Tensor>>;

  /// Of this rank, each with its copy.
  buffers copies_of_buffers() const {
    buffers result;
    auto& tensors = map_.model().tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].is_buffer && map_.owned(i))
        result.emplace_back(tensors[i].tensor, tensors[i].tensor.clone());
    return result;
  }

  void read_expected(byte_reader& in) {
    names_ = in.u64("names of results");
    push_ = in.boolean("push results");
    expected_.result = read_value(in);
    expected_.tensors.resize(in.count(2, "expected results"));
    for (auto& x : expected_.tensors) {
      x.dtype = static_cast<at::ScalarType>(in.u8("dtype"));
      x.requires_grad = in.boolean("requires_grad");
    }
  }

  invocation invoke(const call_target& x, unpacker& in,
                    const std::vector<value>& args, packer& out) {
    if (x.op == request_kind::add) {
      auto a = get_value<at::Tensor>(in, args.at(0));
      auto b = get_value<at::Tensor>(in, args.at(1));
      return {put_value(out, a.add(b)), {}};
    }
    return model_.modules->run(req_.module, x, in, args, out);
  }

  static void check_indexes(const value& args, size_t n) {
    for_each_tensor(args, [n](const tensor_index& x) {
      if (x.index >= n)
        throw error{error_code::protocol, "an argument names tensor "
                                            + std::to_string(x.index) + " of "
                                            + std::to_string(n)};
    });
  }

  /// Where the gradient of an output enters the graph.
  void keep_edge(saved_call& saved, size_t i, const at::Tensor& t) {
    if (saved.outputs.size() <= i)
      saved.outputs.resize(i + 1);
    if (t.requires_grad())
      saved.outputs[i] = ag::impl::gradient_edge(t);
  }

  /// @returns what `t` is besides a result; of kind undefined if nothing.
  wire_tensor place_of(const arrived& arguments, const wire_table& table,
                       const at::Tensor& t) const {
    wire_tensor result;
    for (size_t i = 0; i < arguments.tensors.size(); ++i) {
      if (t.is_same(arguments.tensors[i])) {
        result.what = table[i].what == wire_tensor::kind::parameter
                        ? wire_tensor::kind::parameter
                        : wire_tensor::kind::argument;
        result.index = result.what == wire_tensor::kind::parameter
                         ? table[i].index
                         : static_cast<uint32_t>(i);
        return result;
      }
    }
    if (auto i = map_.model().find(t);
        i >= 0 && (is_placeholder(t) || !map_.model().tensors[i].is_buffer)) {
      result.what = wire_tensor::kind::parameter;
      result.index = static_cast<uint32_t>(i);
    }
    return result;
  }

  wire_tensor put_result(payload& body, const arrived& arguments,
                         const wire_table& table, const at::Tensor& t) {
    auto result = place_of(arguments, table, t);
    return result.what == wire_tensor::kind::undefined
             ? put_travelling(body, t)
             : result;
  }

  wire_tensor put_travelling(payload& body, const at::Tensor& t) {
    auto x = materialise(t);
    if (!hold_)
      return put_data(body, x, map_.shares_state(x));
    wire_tensor result;
    result.what = wire_tensor::kind::object;
    result.requires_grad = x.requires_grad();
    result.object = ex_.rank().objects().hold(map_.shares_state(x)
                                          ? x.detach().clone()
                                          : x.detach());
    return result;
  }

  // -- promises ---------------------------------------------------------------

  /// The caller went on with what an earlier call of this kind returned.
  [[noreturn]] void break_promise(const std::string& how) {
    throw error{failure{error_code::unsupported, ex_.rank().self(), ex_.module_path(),
                        how + ", which an earlier call with arguments of the "
                              "same kind did not, so that its caller went on "
                              "without it (smp.fast_mode): list '"
                          + map_.name(req_.module) + "' in smp.no_promises"}};
  }

  void check_promise(const wire_table& table, const arrived& arguments,
                     const packer& out, const invocation& done) {
    if (!done.changed.empty())
      break_promise("it takes a list or dict that it may change");
    if (ex_.met_state())
      break_promise("it drew random numbers or met state that calls change");
    for (size_t i = 0; i < arguments.tensors.size(); ++i)
      if (auto& t = arguments.tensors[i];
          t.defined() && t._version() != arguments.versions[i])
        break_promise("it changed its tensor argument " + std::to_string(i)
                      + " in place");
    if (!(done.result == expected_.result)
        || out.tensors().size() != expected_.tensors.size())
      break_promise("its result has another structure");
    for (size_t i = 0; i < out.tensors().size(); ++i) {
      auto& t = out.tensors()[i];
      auto name = "result " + std::to_string(i);
      auto place = place_of(arguments, table, t);
      if (place.what != wire_tensor::kind::undefined)
        break_promise(name + " is an argument or a parameter");
      if (t.scalar_type() != expected_.tensors[i].dtype)
        break_promise(name + " has dtype "
                      + std::string{c10::toString(t.scalar_type())});
      if (t.requires_grad() != expected_.tensors[i].requires_grad)
        break_promise(name + (t.requires_grad() ? " requires grad"
                                                : " does not require grad"));
    }
  }

  payload keep_promise(const wire_table& table, const arrived& arguments,
                       packer& out, const invocation& done) {
    check_promise(table, arguments, out, done);
    keep_promises(out.tensors());
    auto saved = std::make_shared<saved_call>();
    saved->leaves = arguments.leaves;
    saved->module = ex_.module_path();
    payload body;
    byte_writer w;
    w.u32(static_cast<uint32_t>(out.tensors().size()));
    for (size_t i = 0; i < out.tensors().size(); ++i) {
      auto x = materialise(out.tensors()[i]);
      keep_edge(*saved, i, x);
      w.u32(static_cast<uint32_t>(x.dim()));
      for (auto size : x.sizes())
        w.i64(size);
      object_id id{ex_.rank().self(), names_ + i,
                   static_cast<uint32_t>(req_.step.value)};
      auto held = map_.shares_state(x) ? x.detach().clone() : x.detach();
      if (push_)
        body.tensors.push_back(to_tensor_ref(held, false));
      ex_.rank().objects().put(id, req_.microbatch, std::move(held));
    }
    write_positions(w, reached_arguments(saved->outputs, saved->leaves));
    body.bytes = w.take();
    keep(std::move(saved));
    return body;
  }

  /// Keeps what backward needs, if there will be one.
  void keep(std::shared_ptr<saved_call> x) {
    if (std::any_of(x->outputs.begin(), x->outputs.end(),
                    [](const ag::Edge& y) { return y.is_valid(); }))
      ex_.rank().calls().put(req_.step, req_.microbatch, req_.id, std::move(x));
  }

  // -- results that the caller waits for --------------------------------------

  payload answer(const wire_table& table, const arrived& arguments,
                 packer& out, invocation done, const random_stream& before) {
    payload body;
    auto saved = std::make_shared<saved_call>();
    saved->leaves = arguments.leaves;
    saved->module = ex_.module_path();
    wire_table results;
    for (auto& t : out.tensors()) {
      results.push_back(put_result(body, arguments, table, t));
      auto what = results.back().what;
      keep_edge(*saved, results.size() - 1,
                what == wire_tensor::kind::data
                    || what == wire_tensor::kind::object
                  ? t
                  : at::Tensor{});
    }
    // An argument whose version moved is one more output (R12).
    std::vector<std::pair<uint32_t, uint32_t>> written;
    for (size_t i = 0; i < arguments.tensors.size(); ++i) {
      auto& t = arguments.tensors[i];
      if (!t.defined() || t._version() == arguments.versions[i])
        continue;
      if (table[i].what == wire_tensor::kind::parameter
          && map_.model().tensors[table[i].index].is_buffer)
        continue; // changed at its owner already
      if (table[i].what == wire_tensor::kind::parameter)
        throw error{failure{error_code::unsupported, ex_.rank().self(),
                            ex_.module_path(),
                            "changes parameter '"
                              + map_.tensor_name(table[i].index)
                              + "', given as an argument, in place"}};
      written.emplace_back(static_cast<uint32_t>(i),
                           static_cast<uint32_t>(results.size()));
      results.push_back(put_travelling(body, t));
      keep_edge(*saved, results.size() - 1, t);
    }
    byte_writer w;
    // The random numbers of a microbatch go on where the callee stopped.
    auto now = random_stream::of_default();
    put_stream(w, body, now == before ? nullptr : &now);
    write(w, done.result);
    std::vector<std::pair<value, value>> changed;
    for (auto& [position, content] : done.changed)
      changed.emplace_back(value::of(int64_t{position}), std::move(content));
    write(w, value::dict(std::move(changed)));
    write(w, results);
    w.u32(static_cast<uint32_t>(written.size()));
    for (auto& [argument, content] : written) {
      w.u32(argument);
      w.u32(content);
    }
    w.boolean(ex_.met_state());
    write_positions(w, model_.promises->on()
                         ? reached_arguments(saved->outputs, saved->leaves)
                         : std::vector<std::vector<uint32_t>>{});
    body.bytes = w.take();
    keep(std::move(saved));
    return body;
  }

  execution& ex_;
  const request& req_;
  const model_context& model_;
  const model_map& map_;
  bool hold_ = false;
  bool promised_ = false;
  bool push_ = false; // the results of a promise come with its answer as well
  uint64_t names_ = 0;
  prediction expected_;
};

payload run_backward(execution& ex, const request& req, byte_reader& in) {
  scoped_context inside{call_context::read(in)};
  request_id id;
  id.origin.value = in.u64("call origin");
  id.number = request_number(req.step, in.u32("call number"));
  auto keep = in.boolean("keep graph");
  auto promised = in.boolean("promised");
  auto table = read_table(in);
  struct wanted_gradient {
    uint32_t argument = 0;
    bool push = false; // else it stays here under its name
  };
  std::vector<wanted_gradient> wanted(in.count(5, "wanted gradients"));
  for (auto& x : wanted) {
    x.argument = in.u32("wanted gradient");
    x.push = in.boolean("push gradient");
  }
  auto names = in.u64("names of gradients");
  ex.rank().objects().drop(read_ids(in));
  in.expect_end();
  auto saved = ex.rank().calls().take(req.step, req.microbatch, id, keep);
  if (!saved)
    throw error{error_code::unsupported,
                "backward a second time through '" + ex.module_path()
                  + "': what its forward kept is gone (pass keep_graph to "
                    "model.backward)"};
  if (table.size() > saved->outputs.size())
    throw error{error_code::protocol, "more gradients than outputs"};
  ag::edge_list roots;
  ag::variable_list grads;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].what == wire_tensor::kind::undefined
        || !saved->outputs[i].is_valid())
      continue;
    roots.push_back(saved->outputs[i]);
    grads.push_back(table[i].what == wire_tensor::kind::object
                      ? ex.rank().objects().fetch(table[i].object)
                      : take_data(req.body, table[i]));
  }
  for (auto& leaf : saved->leaves)
    if (leaf.defined())
      leaf.mutable_grad() = at::Tensor{};
  if (!roots.empty()) {
    execution::backward_scope running{ex};
    ag::Engine::get_default_engine().execute(roots, grads, keep, false, true);
  }
  payload body;
  wire_table result;
  for (size_t k = 0; k < wanted.size(); ++k) {
    auto [argument, push] = wanted[k];
    if (argument >= saved->leaves.size())
      throw error{error_code::protocol, "a gradient of no argument is wanted"};
    auto& leaf = saved->leaves[argument];
    auto grad = leaf.defined() ? leaf.grad() : at::Tensor{};
    if (!promised) {
      result.push_back(put_data(body, grad, false));
      continue;
    }
    // Its caller was told that it exists, as far as the graph can tell.
    if (!grad.defined())
      grad = at::zeros_like(leaf);
    if (push) {
      body.tensors.push_back(to_tensor_ref(grad, false));
      continue;
    }
    object_id name{ex.rank().self(), names + k,
                   static_cast<uint32_t>(req.step.value)};
    ex.rank().objects().put(name, req.microbatch, std::move(grad));
  }
  if (promised)
    return body;
  byte_writer w;
  write(w, result);
  body.bytes = w.take();
  return body;
}

uint32_t read_own_tensor(const model_map& map, byte_reader& in) {
  auto index = in.u32("tensor");
  if (index >= map.model().tensors.size() || !map.owned(index))
    throw error{error_code::protocol,
                "asked for tensor " + std::to_string(index)
                  + ", which this rank does not own"};
  return index;
}

payload read_tensor(const model_map& map, byte_reader& in) {
  auto index = read_own_tensor(map, in);
  in.expect_end();
  payload body;
  body.tensors.push_back(
    to_tensor_ref(map.model().tensors[index].tensor, true));
  return body;
}

payload write_tensor(const model_map& map, const request& req,
                     byte_reader& in) {
  auto index = read_own_tensor(map, in);
  in.expect_end();
  at::NoGradGuard no_grad;
  map.model().tensors[index].tensor.copy_(take_data(req.body, wire_tensor{}));
  return {};
}

payload add_gradient(const model_map& map, const request& req,
                     byte_reader& in) {
  auto index = read_own_tensor(map, in);
  auto table = read_table(in);
  in.expect_end();
  if (table.size() != 1)
    throw error{error_code::protocol, "one gradient wanted"};
  auto grad = take_data(req.body, table[0]);
  if (SMP_FAULT("doubled-reduction"))
    grad = grad * 2;
  auto& leaf = map.model().tensors[index].tensor;
  at::NoGradGuard no_grad;
  if (leaf.grad().defined())
    leaf.mutable_grad().add_(grad);
  else
    leaf.mutable_grad() = grad.clone();
  return {};
}

} // namespace

payload serve(execution& ex, const request& x) {
  auto model = ex.rank().model();
  if (!model || !model->map->partitioned())
    throw error{error_code::protocol, "a request before the partition"};
  auto& map = *model->map;
  if (x.module.value >= map.model().modules.size())
    throw error{error_code::protocol, "a request for an unknown module"};
  ex.enter_module(map.name(x.module));
  byte_reader in{x.body.bytes};
  auto kind = in.u8("kind of work");
  if (kind > static_cast<uint8_t>(last_request_kind))
    in.fail("kind of work", "unknown");
  switch (static_cast<request_kind>(kind)) {
    case request_kind::backward:
      return run_backward(ex, x, in);
    case request_kind::read_tensor:
      return read_tensor(map, in);
    case request_kind::add_gradient:
      return add_gradient(map, x, in);
    case request_kind::write_tensor:
      return write_tensor(map, x, in);
    default:
      return forward_call{ex, x}.run(static_cast<request_kind>(kind), in);
  }
}

} // namespace smp
