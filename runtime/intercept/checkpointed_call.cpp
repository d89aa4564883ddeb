#include "runtime/intercept/checkpointed_call.hpp"

#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/backward_engine.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/calls/writable_copy.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/local_modules.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/lazy/promise.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/offload/offloaded_tensors.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

using pass = recompute_pass::kind;

/// The saved state of one tensor argument.
struct kept_argument {
  at::Tensor content = {};
  uint32_t version = 0;
  /// A parameter, whose gradient does not pass through this node.
  bool parameter = false;
  bool written = false; // by the call
  /// Position among the node's edges, if it requires grad.
  std::optional<uint32_t> edge = {};
};

/// A call to recompute, and its context. May outlive the model.
struct kept_call {
  local_modules& modules;
  module_id module;
  call_target target;
  std::vector<value> args;
  uint32_t region;
  size_t next; // see `packed_call`
  std::vector<kept_argument> tensors = {};
  /// Those tensors whose bytes another interceptor holds; null: none (R57).
  std::unique_ptr<offloaded_tensors> offloaded = {};
  std::string name = {}; // for errors
  call_context context = {};
  recompute_pass again = {};
  /// The call that makes this one; for a single module, this call itself.
  call_streams::origin place = {};
  uint64_t stream = 0; // of a single module; 0: it has none
  std::weak_ptr<model_context> model = {};
  step_id step = {};
  microbatch_id microbatch = {};
  /// By input of the node: position among the tensors that the call returns,
  /// followed by those that it wrote into.
  std::vector<uint32_t> results = {};
  size_t num_results = 0;
};

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw error{error_code::unsupported,
              "'" + name + "', whose activations are checkpointed, " + why};
}

// -- backward -----------------------------------------------------------------

/// Backward of a checkpointed call.
class recompute_node : public ag::Node {
public:
  explicit recompute_node(kept_call x) : call_(std::move(x)) {
    // nop
  }

  std::string name() const override {
    return "smp::checkpointed(" + call_.name + ")";
  }

  void release_variables() override {
    released_ = true;
    call_.offloaded.reset();
    call_.tensors.clear();
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    ag::variable_list result(num_outputs());
    if (std::none_of(grads.begin(), grads.end(),
                     [](auto& x) { return x.defined(); }))
      return result;
    auto& ex = check();
    auto tensors = arguments();
    call_states::recalled state{ex.states()};
    seeded_roots from;
    begin_at(from, run(ex, std::exchange(tensors.given, {})), grads);
    if (!from.roots.empty())
      run_engine(ex, from.roots, from.gradients, false);
    for (size_t i = 0; i < call_.tensors.size(); ++i)
      if (auto edge = call_.tensors[i].edge)
        result[*edge] = tensors.leaves[i].grad();
    return result;
  }

private:
  struct arguments_again {
    std::vector<at::Tensor> leaves; // undefined where no gradient is wanted
    std::vector<at::Tensor> given;
  };

  running_call& check() const {
    auto* ex = running_call::current();
    auto model = call_.model.lock();
    if (!ex || !model || ex->rank().model() != model || ex->step() != call_.step
        || ex->microbatch() != call_.microbatch)
      refuse(call_.name,
             "is differentiated outside of the step and microbatch "
             "in which it was called");
    if (at::GradMode::is_enabled())
      refuse(call_.name, "does not support create_graph (higher derivatives)");
    if (released_)
      refuse(call_.name,
             "is differentiated a second time: what it kept is "
             "gone (pass keep_graph to model.backward)");
    return *ex;
  }

  arguments_again arguments() {
    if (auto x = std::exchange(call_.offloaded, nullptr)) {
      released_ = true; // a failed file cannot return them
      x->put_back();
      released_ = false;
    }
    arguments_again result;
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      auto& x = call_.tensors[i];
      if (!x.parameter && !x.content.is_inference()
          && x.content._version() != x.version)
        refuse(call_.name, "cannot be computed again: its tensor argument "
                             + std::to_string(i)
                             + " was changed in place after the call");
      auto& leaf = result.leaves.emplace_back();
      if (x.parameter) {
        result.given.push_back(x.content);
        continue;
      }
      auto content = x.written ? x.content.clone() : x.content;
      if (x.edge) {
        leaf = content.variable_data().set_requires_grad(true);
        result.given.push_back(writable_copy(leaf));
      } else {
        result.given.push_back(content.variable_data());
      }
    }
    return result;
  }

  /// @returns the outputs of this pass, numbered as in `kept_call::results`
  std::vector<at::Tensor> run(running_call& ex,
                              std::vector<at::Tensor> given) const {
    auto context = call_.context;
    context.grad = true;
    scoped_context inside{context};
    running_call::pass_scope in_pass{ex, call_.again, call_.region};
    auto module = ex.enter_module(call_.name);
    packer out;
    {
      auto entered = enter(ex);
      unpacker in{given};
      call_.modules.run_inside({call_.modules, call_.module, call_.target,
                                call_.args, call_.region, call_.next},
                               in, out);
    }
    ex.rank().model()->parameters->flush();
    keep_promises(out.tensors());
    // The nodes of its calls are complete once these are answered.
    fence(ex);
    ex.enter_module(std::move(module));
    auto result = out.tensors();
    if (result.size() != call_.num_results)
      refuse(call_.name, "returned " + std::to_string(result.size())
                           + " tensors when it was computed again, "
                           + std::to_string(call_.num_results) + " before");
    result.insert(result.end(), given.begin(), given.end());
    return result;
  }

  std::optional<entered_call> enter(running_call& ex) const {
    auto& streams = ex.streams();
    auto single = call_.target.kind == request_kind::call
                  || call_.target.kind == request_kind::method;
    if (!single)
      streams.enter_origin(call_.place);
    else if (call_.stream != 0)
      streams.enter_at(call_.place.path, call_.stream);
    else
      return std::nullopt;
    return std::optional<entered_call>{std::in_place, streams};
  }

  /// Edges where gradients enter the graph; results would hold memory that
  /// backward frees.
  struct seeded_roots {
    ag::edge_list roots;
    ag::variable_list gradients;
  };

  void begin_at(seeded_roots& to, const std::vector<at::Tensor>& results,
                const ag::variable_list& grads) const {
    for (size_t nr = 0; nr < grads.size(); ++nr) {
      auto& x = results.at(call_.results[nr]);
      if (!grads[nr].defined() || !x.requires_grad())
        continue;
      if (x.sizes() != grads[nr].sizes())
        refuse(call_.name,
               "returned a tensor of other sizes when it was "
               "computed again");
      to.roots.push_back(ag::impl::gradient_edge(x));
      to.gradients.push_back(materialise(grads[nr]));
    }
  }

  kept_call call_;
  bool released_ = false;
};

// -- forward ------------------------------------------------------------------

/// The first pass.
class first_pass {
public:
  /// @param tensors that `x.args` name
  first_pass(const packed_call& x, running_call& ex,
             const std::vector<at::Tensor>& tensors)
    : call_(x),
      map_(x.modules.map()),
      ex_(ex),
      given_(tensors),
      kept_(describe()) {
    // nop
  }

  invocation run(packer& out) {
    keep_promises(given_);
    if (!wanted())
      return call_.modules.run_inside(call_, in_, out);
    keep_arguments();
    packer found;
    auto result = run_code(found);
    keep_promises(found.tensors());
    note_written();
    auto results = found.tensors();
    connect(results);
    for (auto& x : results)
      out.add(x);
    return result;
  }

private:
  bool single() const {
    return call_.target.kind == request_kind::call
           || call_.target.kind == request_kind::method;
  }

  module_id first_module() const {
    auto& children = map_.model().modules[call_.module.value].children;
    return single() ? call_.module : module_id{children.at(call_.target.first)};
  }

  kept_call describe() const {
    auto& recomputed = map_.recomputed(first_module());
    kept_call result{call_.modules, call_.module, call_.target,
                     call_.args,    call_.region, call_.next};
    result.name = map_.name(first_module());
    result.context = call_context::current();
    result.again = {pass::again, ex_.pass().numbers};
    if (!recomputed.same_numbers)
      ++result.again.numbers;
    result.place = ex_.streams().here();
    result.stream = single() ? map_.stream_of(call_.module) : 0;
    result.model = ex_.rank().model();
    result.step = ex_.step();
    result.microbatch = ex_.microbatch();
    return result;
  }

  /// Tells whether any argument or parameter here has a gradient.
  bool wanted() const {
    auto has = [](auto& x) { return x.requires_grad(); };
    if (std::any_of(given_.begin(), given_.end(), has))
      return true;
    auto& model = map_.model();
    std::vector<uint32_t> open{static_cast<uint32_t>(call_.module.value)};
    if (!single()) {
      auto children = model.modules[open[0]].children;
      open.assign(children.begin() + call_.target.first,
                  children.begin() + call_.target.last);
    }
    while (!open.empty()) {
      auto& m = model.modules[open.back()];
      open.pop_back();
      for (auto t : m.tensors)
        if (model.tensors[t].tensor.requires_grad())
          return true;
      open.insert(open.end(), m.children.begin(), m.children.end());
    }
    return false;
  }

  bool is_parameter(const at::Tensor& x) const {
    auto i = map_.model().find(x);
    return i >= 0 && (is_placeholder(x) || !map_.model().tensors[i].is_buffer);
  }

  /// Saves arguments, as copies if this call or other code may write to them.
  void keep_arguments() {
    may_write_ = call_.modules.may_write(kept_.region);
    for (auto& x : given_) {
      kept_argument y;
      y.parameter = is_parameter(x);
      if (y.parameter) {
        y.content = x;
        seen_.push_back(x);
      } else {
        auto copy = may_write_ || map_.shares_state(x);
        y.content = copy ? x.detach().clone() : x.detach();
        y.version = y.content.is_inference() ? 0 : y.content._version();
        if (x.requires_grad()) {
          y.edge = static_cast<uint32_t>(edges_.size());
          edges_.push_back(ag::impl::gradient_edge(x));
        }
        seen_.push_back(x.variable_data());
      }
      kept_.tensors.push_back(std::move(y));
    }
  }

  invocation run_code(packer& found) {
    at::NoGradGuard no_grad;
    auto here = ex_.pass();
    if (here.what == pass::only)
      here.what = pass::first;
    running_call::pass_scope in_pass{ex_, here, kept_.region};
    unpacker in{seen_};
    auto result = call_.modules.run_inside(call_, in, found);
    ex_.rank().model()->parameters->flush();
    return result;
  }

  /// Drops the copies of arguments that it did not write to.
  void note_written() {
    auto any = false;
    for (size_t i = 0; i < given_.size(); ++i) {
      auto& x = kept_.tensors[i];
      if (x.parameter)
        continue;
      x.written = seen_[i]._version() != 0;
      any = any || x.written;
      if (x.written && !may_write_)
        refuse(kept_.name, "changed its tensor argument " + std::to_string(i)
                             + " in place, which its first call did not, so "
                               "that it cannot be computed again: let it "
                               "change a copy, or leave it out");
      if (!x.written && may_write_ && !map_.shares_state(given_[i])) {
        x.content = given_[i].detach();
        x.version = x.content.is_inference() ? 0 : x.content._version();
      }
    }
    call_.modules.note_written(kept_.region, any);
  }

  /// @returns the argument that `x` is, if any.
  std::optional<size_t> argument(const at::Tensor& x) const {
    for (size_t i = 0; i < seen_.size(); ++i)
      if (x.is_same(seen_[i]))
        return i;
    return std::nullopt;
  }

  /// Tells whether a write to `x` would change a saved argument.
  bool shares_argument(const at::Tensor& x) const {
    return x.has_storage()
           && std::any_of(seen_.begin(), seen_.end(), [&](auto& y) {
                return y.has_storage() && y.is_alias_of(x);
              });
  }

  /// Gives a gradient to the results and to the arguments that were written to.
  void connect(std::vector<at::Tensor>& results) {
    kept_.num_results = results.size();
    std::vector<at::Tensor> outputs;
    auto put_out = [&](const at::Tensor& x, size_t position) {
      auto y = x.variable_data();
      outputs.push_back(y);
      kept_.results.push_back(static_cast<uint32_t>(position));
      return y;
    };
    std::vector<std::pair<size_t, at::Tensor>> written;
    for (size_t i = 0; i < given_.size(); ++i)
      if (kept_.tensors[i].written)
        written.emplace_back(i,
                             ag::isDifferentiableType(given_[i].scalar_type())
                               ? put_out(seen_[i], results.size() + i)
                               : seen_[i].variable_data());
    auto passed_on = false;
    for (size_t k = 0; k < results.size(); ++k) {
      auto& x = results[k];
      if (auto i = argument(x)) {
        x = given_[*i];
        passed_on = true;
      } else if (!is_parameter(x)) {
        if (shares_argument(x))
          x = x.clone();
        if (ag::isDifferentiableType(x.scalar_type()))
          x = put_out(x, k);
      }
    }
    if (outputs.empty() && passed_on)
      return;
    if (outputs.empty())
      refuse(kept_.name,
             "returns nothing that has a gradient, so nothing would ask for "
             "it again: leave it out");
    hand_over();
    auto node = std::shared_ptr<ag::Node>(new recompute_node(std::move(kept_)),
                                          ag::deleteNode);
    node->set_next_edges(std::move(edges_));
    for (auto& x : outputs)
      ag::impl::set_gradient_edge(x, {node, node->add_input_metadata(x)});
    for (auto& [i, x] : written)
      given_[i].copy_(x);
  }

  /// Lets other interceptors move the saved tensors elsewhere.
  void hand_over() {
    std::vector<at::Tensor> xs;
    for (auto& x : kept_.tensors)
      if (!x.parameter)
        xs.push_back(x.content);
    kept_.offloaded = keep_for_backward(xs);
  }

  const packed_call& call_;
  const model_map& map_;
  running_call& ex_;
  const std::vector<at::Tensor>& given_;
  unpacker in_{given_};
  std::vector<at::Tensor> seen_; // by the code, instead of the given ones
  bool may_write_ = true;
  ag::edge_list edges_;
  kept_call kept_;
};

} // namespace

std::optional<invocation>
recompute_interceptor::around(const packed_call& x, unpacker& in, packer& out) {
  auto* ex = running_call::current();
  // A method called by another method of the same module is part of that call.
  if (x.region == ex->region())
    return std::nullopt;
  return first_pass{x, *ex, in.tensors()}.run(out);
}

} // namespace smp
