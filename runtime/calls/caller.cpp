#include "runtime/calls/caller.hpp"

#include "actors/order/order_book.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/backward_node.hpp"
#include "runtime/calls/messages.hpp"
#include "runtime/calls/module_runner.hpp"
#include "runtime/calls/named_results.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/calls/parameters.hpp"
#include "runtime/calls/promised_call.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/model/model_map.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace smp {

namespace {

namespace ag = torch::autograd;

running_call& executing(const std::string& what) {
  if (auto* ex = running_call::current())
    return *ex;
  throw error{error_code::unsupported,
              what + " lives on another rank: it can be called inside a step "
                     "(smp::step) only"};
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

/// Tells whether a result is a tensor or a tuple of tensors.
bool only_tensors(const value& x, request_kind op) {
  auto is_tensor = [](auto& y) { return y.kind() == value_kind::tensor; };
  auto* tuple = x.get_if<tuple_value>();
  if (op != request_kind::range)
    return tuple
             ? std::all_of(tuple->items.begin(), tuple->items.end(), is_tensor)
             : is_tensor(x);
  // A value carried by a Sequential is preceded by its type; 0 is a tensor, and
  // not an optional one.
  if (!tuple || tuple->items.size() != 2)
    return false;
  auto* type = tuple->items[0].get_if<int64_t>();
  auto& carried = tuple->items[1];
  return type && (*type == 0 || carried.get_if<tuple_value>())
         && only_tensors(carried, request_kind::call);
}

/// A call in transit to its owner.
class outgoing_call {
public:
  outgoing_call(running_call& ex, const model_context& model, rank_id owner,
                module_id module, const call_target& x,
                const std::vector<at::Tensor>& arguments)
    : ex_(ex),
      map_(*model.map),
      book_(*model.promises),
      owner_(owner),
      module_(module),
      target_(x),
      arguments_(arguments),
      numbers_(number_call()),
      name_(map_.name(module)) {
    if (x.kind == request_kind::range || x.kind == request_kind::method_range)
      name_ += "[" + std::to_string(x.first) + ":" + std::to_string(x.last)
               + "]";
    else if (x.kind == request_kind::add)
      name_ = "sum of results of '" + name_ + "'";
  }

  const std::string& name() const noexcept {
    return name_;
  }

  /// Continues with promises of the results that `next` predicts.
  call_result promise(value args, const promise_book::memory& known);

  /// Sends the call as `known` was sent in the replayed step.
  /// @returns nullopt if this is another call; `args` is then unchanged
  std::optional<call_result>
  repeat(value& args, const std::shared_ptr<const recorded_call>& known);

  struct waiting {
    /// Key under which the next call of this kind looks; may be empty.
    std::string kind = {};
    /// Results that stay at their owner until they are used; null: the owner
    /// keeps none.
    std::shared_ptr<const waiting_memo> memo = {};
    /// Records which results are used; may be null.
    taken_results_ptr taken = {};
  };

  /// Waits for the results.
  call_result wait(value args, waiting how);

private:
  call_streams::origin number_call() const;
  remote_tensor put_argument(const at::Tensor& x, bool snapshot);
  forward_request make_request(value args, bool snapshot);
  forward_request make_request(value args, const promise_memo& x);
  call make_call(const forward_request& x) const;
  call_result send(const forward_request& asked, call c, const promise_memo& x,
                   const taken_results_ptr& taken,
                   std::shared_ptr<const recorded_call> recorded);
  void name_results(std::vector<at::Tensor>& tensors, const response& answer,
                    const forward_reply& reply, const wait_reason& why,
                    const taken_results_ptr& taken);
  sent_call describe_sent(request_id id, size_t outputs) const;
  std::shared_ptr<backward_node> make_node(sent_call sent,
                                           const remote_tensors& arguments);
  std::vector<at::Tensor> take_results(const forward_reply& reply) const;
  void connect(const std::vector<at::Tensor>& results,
               const remote_tensors& arguments, request_id id,
               forward_reply& reply);
  void remember(const std::string& kind, const forward_reply& reply,
                const std::vector<at::Tensor>& tensors);
  void check_index(uint32_t i, size_t n, const char* what) const;

  running_call& ex_;
  const model_map& map_;
  promise_book& book_;
  rank_id owner_;
  module_id module_;
  const call_target& target_;
  const std::vector<at::Tensor>& arguments_;
  call_streams::origin numbers_; // that the call draws
  std::string name_;
  /// Those `arguments_` that are promises; kept alive until the reply.
  std::vector<promised_value_ptr> promised_;
};

remote_tensor outgoing_call::put_argument(const at::Tensor& x, bool snapshot) {
  if (auto p = promised_value_of(x)) {
    p->tell(owner_);
    promised_.push_back(p);
    return remote_tensor::needed(static_cast<uint32_t>(promised_.size() - 1),
                                 x.requires_grad());
  }
  if (auto i = map_.model().find(x);
      i >= 0 && (is_placeholder(x) || !map_.model().tensors[i].is_buffer))
    // A parameter stays at its owner (R14), as does any tensor that lives
    // elsewhere.
    return remote_tensor::parameter(static_cast<uint32_t>(i),
                                    x.requires_grad());
  return remote_tensor::of(x, snapshot || map_.shares_state(x));
}

/// Numbers the call at its call site, as if it ran here.
call_streams::origin outgoing_call::number_call() const {
  auto& streams = ex_.streams();
  switch (target_.kind) {
    case request_kind::call:
    case request_kind::method:
      if (auto module = map_.stream_of(module_))
        return {streams.call(module), {}};
      return {};
    case request_kind::range:
    case request_kind::method_range: {
      auto& children = map_.model().modules.at(module_.value).children;
      std::vector<uint64_t> modules;
      for (auto i = target_.first; i < target_.last && i < children.size(); ++i)
        modules.push_back(map_.stream_of(module_id{children[i]}));
      return streams.call_each(modules);
    }
    default:
      return {};
  }
}

forward_request outgoing_call::make_request(value args, bool snapshot) {
  forward_request result;
  result.head = {target_.kind, target_.first, target_.last, 0};
  result.context = call_context::current();
  result.training = target_.training;
  result.invoker = target_.invoker;
  result.name = target_.name;
  result.numbers = numbers_;
  result.pass = ex_.pass();
  result.arguments = std::move(args);
  for (auto& t : arguments_)
    result.tensors.push_back(put_argument(t, snapshot));
  return result;
}

/// Copies: this rank continues and may write to its tensors. It draws no random
/// numbers, and so needs none (R23).
forward_request outgoing_call::make_request(value args, const promise_memo& x) {
  auto result = make_request(std::move(args), true);
  auto& promised = result.promised.emplace();
  promised.result = x.next->result;
  for (size_t i = 0; i < x.next->tensors.size(); ++i) {
    auto& y = x.next->tensors[i];
    promised.tensors.push_back({y.dtype, y.requires_grad, x.push.at(i)});
  }
  return result;
}

call outgoing_call::make_call(const forward_request& x) const {
  auto what = ex_.in_backward() ? phase::backward : phase::forward;
  auto result = remote_call(owner_, module_, what, to_payload(x),
                            answer_of(name_, what, owner_));
  for (auto& y : promised_)
    result.needs.push_back(y->id());
  return result;
}

sent_call outgoing_call::describe_sent(request_id id, size_t outputs) const {
  sent_call result;
  result.owner = owner_;
  result.module = module_;
  result.name = name_;
  result.id = id;
  result.step = ex_.step();
  result.microbatch = ex_.microbatch();
  result.num_outputs = static_cast<uint32_t>(outputs);
  result.waits = target_.kind != request_kind::add
                 && (book_.waits(map_, module_, target_) || book_.all_wait());
  return result;
}

/// A node for this call, made only if an output has a gradient, with edges only
/// for arguments that have one (R10).
std::shared_ptr<backward_node>
outgoing_call::make_node(sent_call sent, const remote_tensors& arguments) {
  ag::edge_list edges;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!arguments[i].travels() || !arguments[i].requires_grad)
      continue;
    auto& x = arguments_[i];
    edges.push_back(ag::impl::gradient_edge(x));
    sent_call::argument argument{static_cast<uint32_t>(i), x.scalar_type(), {}};
    if (auto p = promised_value_of(x)) {
      argument.from = p->request();
      argument.output = p->output();
    } else {
      argument.sizes = x.sizes().vec();
    }
    sent.arguments.push_back(std::move(argument));
  }
  auto result = std::shared_ptr<backward_node>(
    new backward_node(std::move(sent)), ag::deleteNode);
  result->set_next_edges(std::move(edges));
  return result;
}

void outgoing_call::check_index(uint32_t i, size_t n, const char* what) const {
  if (i >= n)
    throw error{error_code::protocol, "answer of '" + name_ + "': " + what + " "
                                        + std::to_string(i)
                                        + " does not exist"};
}

// -- go on without the results ------------------------------------------------

call_result outgoing_call::promise(value args,
                                   const promise_book::memory& known) {
  auto memo = std::make_shared<promise_memo>();
  memo->next = known.next;
  // The reply carries the results that the caller used the last time.
  for (size_t i = 0; i < known.next->tensors.size(); ++i)
    memo->push.push_back(known.taken && known.taken->find(i).value_or(false));
  auto asked = make_request(std::move(args), *memo);
  auto c = promise_call(make_call(asked));
  c.memo = memo;
  return send(asked, std::move(c), *memo, known.taken, {});
}

std::optional<call_result>
outgoing_call::repeat(value& args,
                      const std::shared_ptr<const recorded_call>& known) {
  auto* memo = dynamic_cast<const promise_memo*>(known->memo.get());
  if (!memo)
    return std::nullopt;
  auto asked = make_request(std::move(args), *memo);
  auto c = promise_call(make_call(asked));
  if (!same_call(*known, c)) {
    args = std::move(asked.arguments);
    promised_.clear();
    return std::nullopt;
  }
  return send(asked, std::move(c), *memo, {}, known);
}

call_result outgoing_call::send(const forward_request& asked, call c,
                                const promise_memo& x,
                                const taken_results_ptr& taken,
                                std::shared_ptr<const recorded_call> recorded) {
  auto& next = *x.next;
  auto count = next.tensors.size();
  auto request = std::make_shared<promised_request>();
  request->owner = owner_;
  request->module = module_;
  request->name = name_;
  request->number = book_.next_request(ex_);
  request->pushed = x.push;
  request->tells_sizes = true;
  if (ex_.rank().records().foretells())
    request->recorded = std::move(recorded);
  request->why = c.why;
  request->why.asks = request->number;
  request->arguments = promised_;
  std::vector<at::Tensor> tensors;
  request_id id{ex_.rank().self(), request->number};
  auto sent = describe_sent(id, count);
  for (size_t i = 0; i < count; ++i) {
    auto& what = next.tensors[i];
    auto value = std::make_shared<promised_value>(
      ex_.rank(), request, static_cast<uint32_t>(i),
      result_name(owner_, id, ex_.step(), i), what, taken);
    tensors.push_back(make_promise(std::move(value), what.dtype));
    ex_.add_promise(tensors.back());
    if (what.requires_grad)
      sent.outputs.push_back(static_cast<uint32_t>(i));
  }
  if (!sent.outputs.empty() && at::GradMode::is_enabled()) {
    sent.promise = request;
    auto outputs = sent.outputs;
    auto node = make_node(std::move(sent), asked.tensors);
    static constexpr int64_t unknown[] = {-1};
    for (auto i : outputs) {
      auto nr = node->add_input_metadata(tensors[i].options(),
                                         c10::fromIntArrayRefSlow(unknown),
                                         false, false, next.tensors[i].dtype);
      ag::impl::set_gradient_edge(tensors[i], {node, nr});
    }
    request->node = node;
  }
  c.released = book_.take_releases(owner_);
  send_promise(ex_, std::move(c), request);
  return {next.result, {}, unpacker{std::move(tensors)}};
}

// -- wait for the results -----------------------------------------------------

void outgoing_call::remember(const std::string& kind,
                             const forward_reply& reply,
                             const std::vector<at::Tensor>& tensors) {
  if (kind.empty())
    return;
  auto& results = reply.tensors;
  auto predictable = !reply.stateful && reply.written.empty()
                     && reply.changed.empty()
                     && results.size() <= max_named_results
                     && arguments_.size() <= max_named_results
                     && std::all_of(
                       results.begin(), results.end(), [](auto& x) {
                         return x.what == remote_tensor::kind::data;
                       });
  if (!target_.tensors_only || !predictable
      || !only_tensors(reply.result, target_.kind))
    return book_.remember(kind, {});
  auto next = std::make_shared<prediction>();
  next->result = reply.result;
  for (size_t i = 0; i < tensors.size(); ++i)
    next->tensors.push_back(
      {tensors[i].scalar_type(), results[i].requires_grad, tensors[i].dim()});
  book_.remember(kind, std::move(next));
}

std::vector<at::Tensor>
outgoing_call::take_results(const forward_reply& reply) const {
  auto& xs = reply.tensors;
  std::vector<at::Tensor> result(xs.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    auto& x = xs[i];
    switch (x.what) {
      case remote_tensor::kind::undefined:
        break;
      case remote_tensor::kind::held: // see `name_results`
        check_index(static_cast<uint32_t>(i), reply.named, "name of result");
        break;
      case remote_tensor::kind::needed:
      case remote_tensor::kind::object:
        check_index(x.index, 0, "needed result");
        break;
      case remote_tensor::kind::data:
        result[i] = x.tensor();
        break;
      case remote_tensor::kind::argument:
        check_index(x.index, arguments_.size(), "argument");
        result[i] = arguments_[x.index];
        break;
      case remote_tensor::kind::parameter:
        check_index(x.index, map_.model().tensors.size(), "parameter");
        result[i] = map_.model().tensors[x.index].tensor;
        break;
    }
  }
  return result;
}

/// Gives a gradient to those results that have one at the owner.
void outgoing_call::connect(const std::vector<at::Tensor>& results,
                            const remote_tensors& arguments, request_id id,
                            forward_reply& reply) {
  auto sent = describe_sent(id, results.size());
  for (size_t i = 0; i < results.size(); ++i)
    if (reply.tensors[i].travels() && reply.tensors[i].requires_grad)
      sent.outputs.push_back(static_cast<uint32_t>(i));
  if (sent.outputs.empty() || !at::GradMode::is_enabled())
    return;
  sent.reaches = std::move(reply.reaches);
  auto outputs = sent.outputs;
  auto node = make_node(std::move(sent), arguments);
  for (uint32_t nr = 0; nr < outputs.size(); ++nr) {
    auto& x = results[outputs[nr]];
    node->add_input_metadata(x.options(), x.sym_sizes(), false, false,
                             x.scalar_type());
    ag::impl::set_gradient_edge(x, {node, nr});
  }
}

/// Makes promises of results that their owner keeps by name: which of them the
/// caller uses is known only when it does.
void outgoing_call::name_results(std::vector<at::Tensor>& tensors,
                                 const response& answer,
                                 const forward_reply& reply,
                                 const wait_reason& why,
                                 const taken_results_ptr& taken) {
  check_index(reply.named - 1, tensors.size(), "named result");
  auto request = std::make_shared<promised_request>();
  request->owner = owner_;
  request->module = module_;
  request->name = name_;
  request->number = answer.id.number;
  request->why = why;
  request->why.asks = request->number;
  request->waited = true;
  request->contents = tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& x = reply.tensors[i];
    auto held = x.what == remote_tensor::kind::held;
    request->pushed.push_back(!held);
    request->sizes.push_back(x.data.shape);
    request->strides.push_back(x.data.strides);
    if (i >= reply.named || (!held && x.what != remote_tensor::kind::data))
      continue;
    prediction::tensor what{static_cast<at::ScalarType>(x.data.dtype),
                            x.requires_grad,
                            static_cast<int64_t>(x.data.shape.size())};
    auto value = std::make_shared<promised_value>(
      ex_.rank(), request, i, result_name(owner_, answer.id, ex_.step(), i),
      what, taken);
    tensors[i] = make_promise(std::move(value), what.dtype, &x.data.shape);
    ex_.add_promise(tensors[i]);
  }
  request->set();
}

call_result outgoing_call::wait(value args, waiting how) {
  auto asked = make_request(std::move(args), false);
  if (how.memo)
    asked.held = how.memo->held;
  auto c = make_call(asked);
  c.memo = std::move(how.memo);
  c.released = book_.take_releases(owner_);
  auto why = c.why;
  auto answer = ex_.park(std::move(c));
  auto reply = from_payload<forward_reply>(answer.body, "reply");
  if (reply.stateful)
    ex_.note_state();
  auto tensors = take_results(reply);
  remember(how.kind, reply, tensors);
  if (reply.named > 0)
    name_results(tensors, answer, reply, why, how.taken);
  connect(tensors, asked.tensors, answer.id, reply);
  for (auto [argument, content] : reply.written) {
    check_index(argument, arguments_.size(), "argument");
    check_index(content, tensors.size(), "content");
    write_back(arguments_[argument], tensors[content], name_, argument);
  }
  return {std::move(reply.result), std::move(reply.changed),
          unpacker{std::move(tensors)}};
}

} // namespace

void fail_call(module_id module, const error& err) {
  auto cause = err.cause();
  if (auto model = rank_context::current_model())
    cause.text = "call of '" + model->map->name(module) + "': " + cause.text;
  throw error{std::move(cause)};
}

call_result call_remote(rank_id owner, module_id module, const call_target& x,
                        const packer& in, std::vector<value> args) {
  auto model = rank_context::current_model();
  if (!model)
    throw error{error_code::unsupported,
                "a module of a model whose session "
                "ended is called"};
  if (owner == model->map->self())
    return model->modules->call(module, x, in, args);
  auto& ex = executing("module '" + model->map->name(module) + "'");
  model->parameters->flush();
  outgoing_call out{ex, *model, owner, module, x, in.tensors()};
  auto all = value::tuple(std::move(args));
  auto& book = *model->promises;
  auto attribute = x.kind == request_kind::get_attribute
                   || x.kind == request_kind::set_attribute;
  if (attribute)
    ex.note_state();
  if (attribute || book.waits(*model->map, module, x))
    return out.wait(std::move(all), {});
  // A replayed step needs no prediction: its record has the answer.
  auto recorded = book.recorded(ex);
  if (recorded && recorded->kind != call_kind::promise)
    return out.wait(
      std::move(all),
      {.memo = std::dynamic_pointer_cast<const waiting_memo>(recorded->memo)});
  if (recorded)
    if (auto result = out.repeat(all, recorded))
      return std::move(*result);
  auto kind = kind_of_call(module, x, all, in.tensors());
  auto known = book.find(kind, ex.requests());
  if (!known)
    return out.wait(std::move(all), {.kind = std::move(kind)});
  if (known->next)
    return out.promise(std::move(all), *known);
  // Code invisible to smp may write to tensors that it returned.
  if (!model->map->order().unseen().empty())
    return out.wait(std::move(all), {});
  auto memo = std::make_shared<waiting_memo>();
  memo->held = known->taken->left();
  return out.wait(std::move(all), {.memo = memo, .taken = known->taken});
}

bool add_remotely(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  static const c10::OperatorName add{"aten::add", "Tensor"};
  auto n = stack.size();
  if (op.operator_name() != add || n < 3 || !stack[n - 3].isTensor()
      || !stack[n - 2].isTensor())
    return false;
  std::vector<at::Tensor> xs{stack[n - 3].toTensor(), stack[n - 2].toTensor()};
  auto a = promised_value_of(xs[0]);
  auto b = promised_value_of(xs[1]);
  auto* ex = running_call::current();
  auto alpha = stack[n - 1].toScalar();
  // Operands that are already here are added here at no cost.
  if (!a || !b || !ex || a->here() || b->here()
      || a->id().owner != b->id().owner || a->what().dtype != b->what().dtype
      || !alpha.isIntegral(false) || alpha.toLong() != 1)
    return false;
  auto model = ex->rank().model();
  auto next = std::make_shared<prediction>();
  next->result = value::tensor(0);
  next->tensors.push_back(
    {a->what().dtype,
     at::GradMode::is_enabled()
       && (xs[0].requires_grad() || xs[1].requires_grad()),
     std::max(a->what().dim, b->what().dim)});
  call_target target;
  target.kind = request_kind::add;
  std::vector<value> args{value::tensor(0), value::tensor(1)};
  if (xs[0].is_same(xs[1])) {
    xs.pop_back();
    args[1] = value::tensor(0);
  }
  outgoing_call out{*ex,    *model, a->id().owner, a->request()->module,
                    target, xs};
  auto all = value::tuple(std::move(args));
  auto recorded = model->promises->recorded(*ex);
  auto repeated = recorded ? out.repeat(all, recorded) : std::nullopt;
  auto result = repeated ? std::move(*repeated)
                         : out.promise(std::move(all), {next, {}});
  torch::jit::drop(stack, 3);
  stack.emplace_back(result.tensors.tensor(0));
  return true;
}

} // namespace smp
