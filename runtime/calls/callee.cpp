#include "runtime/calls/callee.hpp"

#include "actors/protocol/request_number.hpp"
#include "partition/rank_layout.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/backward_engine.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/entered_modules.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/module_runner.hpp"
#include "runtime/calls/named_results.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/calls/reached_arguments.hpp"
#include "runtime/calls/writable_copy.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/execution/saved_calls.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/offload/offloaded_tensors.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace smp {

namespace {

namespace ag = torch::autograd;

/// The arguments of a call as its module receives them.
struct arrived {
  /// Leaves where their gradients come out; undefined where none is wanted.
  std::vector<at::Tensor> leaves;
  /// The tensors that the module receives.
  std::vector<at::Tensor> tensors;
  std::vector<uint32_t> versions;
};

/// @returns a result that `req` needs and that is here.
at::Tensor take_needed(const running_call& ex, const request& req,
                       const remote_tensor& x) {
  if (x.what != remote_tensor::kind::needed || x.index >= req.needs.size())
    throw error{error_code::protocol, "a request names needed result "
                                        + std::to_string(x.index) + " of "
                                        + std::to_string(req.needs.size())};
  return ex.rank().objects().fetch(req.needs[x.index]);
}

/// @param shared the call does not write to its arguments, or fails: objects
/// held by this rank need no copy
arrived take_arguments(const running_call& ex, const request& req,
                       const remote_tensors& xs, bool grad, bool shared) {
  auto& model = ex.rank().model()->map->model();
  arrived result;
  result.leaves.resize(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    auto& x = xs[i];
    at::Tensor t;
    switch (x.what) {
      case remote_tensor::kind::undefined:
        break;
      case remote_tensor::kind::data:
        t = x.content;
        break;
      case remote_tensor::kind::needed:
        t = take_needed(ex, req, x).detach();
        t = shared && !t.is_inference() ? t.variable_data() : t.clone();
        break;
      case remote_tensor::kind::parameter:
        if (x.index >= model.tensors.size())
          throw error{error_code::protocol, "unknown parameter in a request"};
        t = model.tensors[x.index].tensor;
        break;
      case remote_tensor::kind::argument:
      case remote_tensor::kind::held:
      case remote_tensor::kind::object:
        throw error{error_code::protocol, "an argument names itself"};
    }
    if (SMP_FAULT("transposed-argument") && x.travels() && t.dim() > 1)
      t = t.transpose(-2, -1).contiguous().view(t.sizes());
    if (x.travels() && x.requires_grad && grad) {
      t.set_requires_grad(true);
      result.leaves[i] = t;
      t = writable_copy(t);
    }
    result.versions.push_back(t.defined() ? t._version() : 0);
    result.tensors.push_back(std::move(t));
  }
  return result;
}

call_target target_of(const forward_request& x) {
  call_target result;
  result.kind = x.head.what;
  result.first = x.head.first;
  result.last = x.head.last;
  result.invoker = x.invoker;
  result.name = x.name;
  result.training = x.training;
  return result;
}

/// Runs a call or range; keeps what backward needs.
class forward_call {
public:
  forward_call(running_call& ex, const request& req, forward_request asked)
    : ex_(ex),
      req_(req),
      asked_(std::move(asked)),
      model_(*ex.rank().model()),
      map_(*model_.map) {
    // nop
  }

  payload run() {
    auto* args = asked_.arguments.get_if<tuple_value>();
    if (!args)
      throw error{error_code::protocol, "the arguments are not a tuple"};
    check_indexes();
    // Outside of inference mode, which does not track whether an argument was
    // written (R12).
    arguments_ = take_arguments(ex_, req_, asked_.tensors, asked_.context.grad,
                                asked_.expected.has_value());
    scoped_context inside{asked_.context};
    running_call::pass_scope pass{ex_, asked_.pass, 0};
    auto stale = SMP_FAULT("stale-buffer") ? copies_of_buffers() : buffers{};
    packer out;
    unpacker tensors{arguments_.tensors};
    auto done = invoke(tensors, args->items, out);
    for (auto& [buffer, old] : stale)
      buffer.variable_data().copy_(old); // autograd sees no change
    if (!entered_modules(map_, req_).empty())
      ex_.note_state();
    // The facts about its own calls are complete once they are answered.
    fence(ex_);
    return to_payload(answer(out, std::move(done)));
  }

private:
  using buffers = std::vector<std::pair<at::Tensor, at::Tensor>>;

  /// The buffers of this rank, each with a copy.
  buffers copies_of_buffers() const {
    buffers result;
    auto& tensors = map_.model().tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].is_buffer && map_.owned(i))
        result.emplace_back(tensors[i].tensor, tensors[i].tensor.clone());
    return result;
  }

  invocation invoke(unpacker& in, const std::vector<value>& args, packer& out) {
    if (asked_.head.what == request_kind::add) {
      auto a = get_value<at::Tensor>(in, args.at(0));
      auto b = get_value<at::Tensor>(in, args.at(1));
      return {put_value(out, a.add(b)), {}};
    }
    auto entered = enter();
    auto result = model_.modules->run(req_.module, target_of(asked_), in, args,
                                      out);
    model_.parameters->flush();
    return result;
  }

  /// The code gets the random numbers that it would have if it ran at the call
  /// site (R23).
  std::optional<entered_call> enter() {
    auto& streams = ex_.streams();
    auto module = map_.stream_of(req_.module);
    switch (asked_.head.what) {
      case request_kind::call:
      case request_kind::method:
        if (module == 0)
          return std::nullopt;
        streams.enter_at(asked_.numbers.path, module);
        break;
      case request_kind::range:
      case request_kind::method_range:
        streams.enter_origin(asked_.numbers);
        break;
      default:
        return std::nullopt;
    }
    return std::optional<entered_call>{std::in_place, streams};
  }

  void check_indexes() const {
    auto n = asked_.tensors.size();
    for_each_tensor(asked_.arguments, [n](const tensor_index& x) {
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

  /// @returns the role of `t` besides that of a result; undefined if none.
  remote_tensor place_of(const at::Tensor& t) const {
    for (uint32_t i = 0; i < arguments_.tensors.size(); ++i)
      if (t.is_same(arguments_.tensors[i]))
        return asked_.tensors[i].what == remote_tensor::kind::parameter
                 ? remote_tensor::parameter(asked_.tensors[i].index)
                 : remote_tensor::argument(i);
    if (auto i = map_.model().find(t);
        i >= 0 && (is_placeholder(t) || !map_.model().tensors[i].is_buffer))
      return remote_tensor::parameter(static_cast<uint32_t>(i));
    return {};
  }

  remote_tensor put_result(uint32_t i, const at::Tensor& t) {
    auto result = place_of(t);
    if (result.what != remote_tensor::kind::undefined || !t.defined())
      return result;
    return asked_.left ? put_named(i, t) : put_travelling(t);
  }

  remote_tensor put_travelling(const at::Tensor& t) {
    auto x = materialise(t);
    auto snapshot = map_.shares_state(x);
    return remote_tensor::of(std::move(x), snapshot);
  }

  /// The caller may pass it on by name, and may have left the content of an
  /// earlier one here.
  remote_tensor put_named(uint32_t i, const at::Tensor& t) {
    auto x = materialise(t);
    auto kept = own_copy(x);
    auto& left = *asked_.left;
    auto result = std::ranges::find(left, i) != left.end()
                    ? remote_tensor::held(kept)
                    : remote_tensor::of(kept, false);
    result.requires_grad = x.requires_grad();
    ex_.rank().objects().put(
      result_name(ex_.rank().self(), req_.id, req_.step, i), req_.microbatch,
      std::move(kept));
    return result;
  }

  /// @returns `x` as a tensor that nothing else changes.
  at::Tensor own_copy(const at::Tensor& x) const {
    return map_.shares_state(x) ? x.detach().clone() : x.detach();
  }

  std::shared_ptr<saved_call> begin_saving() const {
    auto result = std::make_shared<saved_call>();
    result->leaves = arguments_.leaves;
    // The content of arguments is kept only by nodes that need it (R3).
    for (auto& x : result->leaves)
      if (x.defined())
        drop_content(x);
    result->module = ex_.module_path();
    result->path = asked_.numbers.path;
    result->made = ex_.streams().take_made();
    return result;
  }

  // -- promises ---------------------------------------------------------------

  /// The caller continued with the results of an earlier call of this kind.
  [[noreturn]] void break_promise(const std::string& how) {
    throw error{failure{error_code::unsupported, ex_.rank().self(),
                        ex_.module_path(),
                        how
                          + ", which an earlier call with arguments of the "
                            "same kind did not, so that its caller went on "
                            "without it (smp.fast_mode): list '"
                          + map_.name(req_.module) + "' in smp.no_promises"}};
  }

  void check_promise(const packer& out, const invocation& done) {
    auto& expected = *asked_.expected;
    if (!done.changed.empty())
      break_promise("it takes a list or dict that it may change");
    if (ex_.met_state())
      break_promise("it met state that calls change");
    for (size_t i = 0; i < arguments_.tensors.size(); ++i)
      if (auto& t = arguments_.tensors[i];
          t.defined() && t._version() != arguments_.versions[i])
        break_promise("it changed its tensor argument " + std::to_string(i)
                      + " in place");
    if (!(done.result == expected.result)
        || out.tensors().size() != expected.tensors.size())
      break_promise("its result has another structure");
    for (size_t i = 0; i < out.tensors().size(); ++i) {
      auto& t = out.tensors()[i];
      auto name = "result " + std::to_string(i);
      if (place_of(t).what != remote_tensor::kind::undefined)
        break_promise(name + " is an argument or a parameter");
      if (static_cast<uint8_t>(t.scalar_type())
          != expected.tensors[i].meta.dtype)
        break_promise(name + " has dtype "
                      + std::string{c10::toString(t.scalar_type())});
      if (static_cast<uint8_t>(t.device().type())
          != expected.tensors[i].meta.device.type)
        break_promise(name + " is on device " + t.device().str());
      if (t.requires_grad() != expected.tensors[i].requires_grad)
        break_promise(
          name
          + (t.requires_grad() ? " requires grad" : " does not require grad"));
    }
  }

  /// Keeps the state for backward, if there will be one.
  void keep(std::shared_ptr<saved_call> x) {
    if (std::any_of(x->outputs.begin(), x->outputs.end(),
                    [](const ag::Edge& y) { return y.is_valid(); }))
      ex_.rank().calls().put(req_.step, req_.microbatch, req_.id, std::move(x));
  }

  // -- the reply --------------------------------------------------------------

  call_reply answer(packer& out, invocation done) {
    if (asked_.expected)
      check_promise(out, done);
    keep_promises(out.tensors());
    call_reply result;
    auto saved = begin_saving();
    if (out.tensors().size() > max_named_results)
      asked_.left.reset();
    for (auto& t : out.tensors()) {
      auto i = static_cast<uint32_t>(result.tensors.size());
      result.tensors.push_back(put_result(i, t));
      keep_edge(*saved, i, result.tensors.back().travels() ? t : at::Tensor{});
    }
    if (asked_.left)
      result.named = static_cast<uint32_t>(result.tensors.size());
    put_written(result, *saved);
    if (!asked_.expected)
      result.result = std::move(done.result);
    result.changed = std::move(done.changed);
    result.stateful = ex_.met_state();
    if (model_.promises->on())
      result.reaches = reached_arguments(saved->outputs, saved->leaves);
    keep(std::move(saved));
    return result;
  }

  /// An argument whose version changed is an additional output (R12).
  void put_written(call_reply& result, saved_call& saved) {
    for (uint32_t i = 0; i < arguments_.tensors.size(); ++i) {
      auto& t = arguments_.tensors[i];
      if (!t.defined() || t._version() == arguments_.versions[i])
        continue;
      auto& came = asked_.tensors[i];
      if (came.what == remote_tensor::kind::parameter
          && map_.model().tensors[came.index].is_buffer)
        continue; // changed at its owner already
      if (came.what == remote_tensor::kind::parameter)
        throw error{failure{error_code::unsupported, ex_.rank().self(),
                            ex_.module_path(),
                            "changes parameter '" + map_.tensor_name(came.index)
                              + "', given as an argument, in place"}};
      auto content = static_cast<uint32_t>(result.tensors.size());
      result.written.push_back({i, content});
      result.tensors.push_back(put_travelling(t));
      keep_edge(saved, content, t);
    }
  }

  running_call& ex_;
  const request& req_;
  forward_request asked_;
  const model_context& model_;
  const model_map& map_;
  arrived arguments_;
};

// -- backward -----------------------------------------------------------------

/// Runs autograd from those outputs of `saved` that have gradients.
void run_graph(running_call& ex, const request& req, const saved_call& saved,
               const backward_request& asked) {
  if (asked.gradients.size() > saved.outputs.size())
    throw error{error_code::protocol, "more gradients than outputs"};
  ag::edge_list roots;
  ag::variable_list grads;
  for (size_t i = 0; i < asked.gradients.size(); ++i) {
    auto& x = asked.gradients[i];
    if (x.what == remote_tensor::kind::undefined
        || !saved.outputs[i].is_valid())
      continue;
    roots.push_back(saved.outputs[i]);
    grads.push_back(x.what == remote_tensor::kind::data
                      ? x.content
                      : take_needed(ex, req, x));
  }
  for (auto& leaf : saved.leaves)
    if (leaf.defined())
      leaf.mutable_grad() = at::Tensor{};
  if (roots.empty())
    return;
  ex.streams().begin_backward(saved.made);
  ex.streams().enter_at(path_of_call(saved.path, path_of_backward, 0), 0);
  entered_call entered{ex.streams()};
  run_engine(ex, roots, grads, asked.keep_graph);
}

/// The leaf of the `k`-th wanted gradient.
const at::Tensor& wanted_leaf(const saved_call& saved,
                              const backward_request& asked, size_t k) {
  auto argument = asked.wanted[k].argument;
  if (argument >= saved.leaves.size())
    throw error{error_code::protocol,
                "a gradient is asked for of an argument that does not exist"};
  return saved.leaves[argument];
}

/// The gradients that stay here get the names with which their caller goes on.
call_reply answer_gradients(running_call& ex, const request& req,
                            const saved_call& saved,
                            const backward_request& asked) {
  call_reply result;
  for (size_t k = 0; k < asked.wanted.size(); ++k) {
    auto& leaf = wanted_leaf(saved, asked, k);
    auto grad = leaf.defined() ? leaf.grad() : at::Tensor{};
    // Its caller relies on it, since the graph says that it may exist.
    if (asked.promised && !grad.defined())
      grad = at::zeros_like(leaf);
    if (!grad.defined() || asked.wanted[k].push) {
      result.tensors.push_back(remote_tensor::of(grad, false));
      continue;
    }
    result.tensors.push_back(remote_tensor::held(grad));
    auto name = result_name(ex.rank().self(), req.id, req.step, k);
    ex.rank().objects().put(name, req.microbatch, std::move(grad));
  }
  return result;
}

payload run_backward(running_call& ex, const request& req,
                     const backward_request& asked) {
  scoped_context inside{asked.context};
  request_id id{asked.origin, request_number(req.step, asked.call)};
  auto saved = ex.rank().calls().take(req.step, req.microbatch, id,
                                      asked.keep_graph);
  if (!saved)
    throw error{error_code::unsupported,
                "backward a second time through '" + ex.module_path()
                  + "': what its forward kept is gone (pass keep_graph to "
                    "model.backward)"};
  run_graph(ex, req, *saved, asked);
  return to_payload(answer_gradients(ex, req, *saved, asked));
}

// -- parameters and buffers ---------------------------------------------------

payload serve_parameter(const rank_context& rank, const model_map& map,
                        const parameter_request& asked) {
  auto index = asked.head.tensor;
  if (index >= map.model().tensors.size() || !map.owned(index))
    throw error{error_code::protocol, "asked for tensor "
                                        + std::to_string(index)
                                        + ", which this rank does not own"};
  auto& own = map.model().tensors[index].tensor;
  await_late(own);
  if (asked.head.what == request_kind::read_tensor)
    return to_payload(parameter_reply{to_tensor_ref(own, true)});
  auto value = to_tensor(asked.value);
  at::NoGradGuard no_grad;
  if (asked.head.what == request_kind::write_tensor) {
    own.copy_(value);
    return {};
  }
  // Optimizers look at memory, not at sizes.
  if (value.sizes() != own.sizes())
    throw error{error_code::protocol,
                "a gradient of the sizes " + c10::str(value.sizes()) + " for '"
                  + map.tensor_name(index) + "' of the sizes "
                  + c10::str(own.sizes())};
  if (SMP_FAULT("doubled-reduction"))
    value = value * 2;
  // A slice gets contributions of all ranks that share it, and needs the mean.
  if (map.slice(index) != nullptr)
    value = value / static_cast<double>(rank.layout().size(comm_group::tp));
  if (own.grad().defined())
    own.mutable_grad().add_(value);
  else
    own.mutable_grad() = ag::utils::clone_obey_contract(value, own);
  if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(own))
    (*hook)(own);
  return {};
}

} // namespace

payload serve(running_call& ex, const request& x) {
  auto model = ex.rank().model();
  if (!model || !model->map->partitioned())
    throw error{error_code::protocol, "a request before the partition"};
  auto& map = *model->map;
  if (x.module.value >= map.model().modules.size())
    throw error{error_code::protocol, "a request for an unknown module"};
  ex.enter_module(map.name(x.module));
  ex.rank().objects().drop(x.released);
  switch (read_head(x.body).what) {
    case request_kind::backward:
      return run_backward(
        ex, x, from_payload<backward_request>(x.body, "backward request"));
    case request_kind::read_tensor:
    case request_kind::add_gradient:
    case request_kind::write_tensor:
      return serve_parameter(
        ex.rank(), map,
        from_payload<parameter_request>(x.body, "parameter request"));
    default:
      return forward_call{
        ex, x, from_payload<forward_request>(x.body, "forward request")}
        .run();
  }
}

} // namespace smp
