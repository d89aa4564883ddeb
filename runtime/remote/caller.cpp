#include "runtime/remote/caller.hpp"

#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/remote/object_store.hpp"
#include "runtime/remote/parameters.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/remote/promised_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/remote/backward_node.hpp"
#include "runtime/remote/request_kind.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace smp {

namespace {

namespace ag = torch::autograd;

execution& executing(const std::string& what) {
  if (auto* ex = execution::current())
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
    return tuple ? std::all_of(tuple->items.begin(), tuple->items.end(),
                               is_tensor)
                 : is_tensor(x);
  // What a Sequential carries has its type before it; 0 is a tensor, and not
  // one that may be missing.
  if (!tuple || tuple->items.size() != 2)
    return false;
  auto* type = tuple->items[0].get_if<int64_t>();
  auto& carried = tuple->items[1];
  return type
         && (*type == 0 || carried.get_if<tuple_value>())
         && only_tensors(carried, request_kind::call);
}

/// A call on its way to its owner.
class outgoing_call {
public:
  outgoing_call(execution& ex, const model_context& model, rank_id owner,
                module_id module, const call_target& x,
                const std::vector<at::Tensor>& arguments)
    : ex_(ex),
      map_(*model.map),
      book_(*model.promises),
      owner_(owner),
      module_(module),
      target_(x),
      arguments_(arguments),
      name_(map_.name(module)) {
    if (x.op == request_kind::range || x.op == request_kind::method_range)
      name_ += "[" + std::to_string(x.first) + ":" + std::to_string(x.last)
               + "]";
    else if (x.op == request_kind::add)
      name_ = "sum of results of '" + name_ + "'";
  }

  const std::string& name() const noexcept {
    return name_;
  }

  /// Goes on with promises of what `next` tells.
  call_result promise(value args, const prediction& next);

  /// Waits for the results.
  /// @param kind what the next call of this kind will look for; may be empty
  call_result wait(value args, const std::string& kind);

private:
  wire_tensor put_argument(const at::Tensor& x, bool snapshot);
  void put_arguments(bool snapshot);
  void begin(byte_writer& out, wire_results results);
  call make_call(byte_writer& out);
  remote_call_record make_record(request_id id, size_t outputs) const;
  std::shared_ptr<remote_call_node> make_node(remote_call_record record);
  void remember(const std::string& kind, bool predictable, const value& result,
                const wire_table& results,
                const std::vector<at::Tensor>& tensors);
  void check_index(uint32_t i, size_t n, const char* what) const;

  execution& ex_;
  const model_map& map_;
  promise_book& book_;
  rank_id owner_;
  module_id module_;
  const call_target& target_;
  const std::vector<at::Tensor>& arguments_;
  std::string name_;
  payload body_;
  wire_table table_;
  /// Those of `arguments_` that are promises; keeps them until the answer.
  std::vector<promised_value_ptr> promised_;
};

wire_tensor outgoing_call::put_argument(const at::Tensor& x, bool snapshot) {
  wire_tensor result;
  if (auto p = promised_value_of(x)) {
    result.what = wire_tensor::kind::object;
    result.object = p->id();
    result.requires_grad = x.requires_grad();
    p->tell(owner_);
    promised_.push_back(std::move(p));
    return result;
  }
  if (auto i = map_.model().find(x);
      i >= 0 && (is_placeholder(x) || !map_.model().tensors[i].is_buffer)) {
    // A parameter stays with its owner (R14), and so does what is elsewhere
    // anyway.
    result.what = wire_tensor::kind::parameter;
    result.index = static_cast<uint32_t>(i);
    result.requires_grad = x.requires_grad();
    return result;
  }
  return put_data(body_, x, snapshot || map_.shares_state(x));
}

void outgoing_call::put_arguments(bool snapshot) {
  for (auto& t : arguments_)
    table_.push_back(put_argument(t, snapshot));
}

void outgoing_call::begin(byte_writer& out, wire_results results) {
  out.u8(static_cast<uint8_t>(target_.op));
  out.u32(target_.first);
  out.u32(target_.last);
  out.u8(static_cast<uint8_t>(results));
  out.u64(ex_.next_call());
  call_context::current().write(out);
  out.boolean(target_.training);
  out.u64(target_.invoker);
  out.string(target_.name);
}

call outgoing_call::make_call(byte_writer& out) {
  write_ids(out, book_.take_releases(owner_));
  body_.bytes = out.take();
  call result;
  result.owner = owner_;
  result.module = module_;
  result.what = ex_.in_backward() ? phase::backward : phase::forward;
  result.body = std::move(body_);
  result.why = {"'" + name_ + "', "
                  + (ex_.in_backward() ? "backward" : "forward"),
                owner_};
  for (auto& x : promised_)
    result.needs.push_back(x->id());
  return result;
}

remote_call_record outgoing_call::make_record(request_id id,
                                              size_t outputs) const {
  remote_call_record result;
  result.owner = owner_;
  result.module = module_;
  result.name = name_;
  result.id = id;
  result.step = ex_.step();
  result.microbatch = ex_.microbatch();
  result.num_outputs = static_cast<uint32_t>(outputs);
  result.waits = target_.op != request_kind::add
                 && book_.waits(map_, module_, target_);
  return result;
}

/// An own node, made only if an output has a gradient, with edges only for
/// arguments that have one (R10).
std::shared_ptr<remote_call_node>
outgoing_call::make_node(remote_call_record record) {
  ag::edge_list edges;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    auto travels = table_[i].what == wire_tensor::kind::data
                   || table_[i].what == wire_tensor::kind::object;
    if (!travels || !table_[i].requires_grad)
      continue;
    auto& x = arguments_[i];
    edges.push_back(ag::impl::gradient_edge(x));
    remote_call_record::argument argument{static_cast<uint32_t>(i),
                                          x.scalar_type(),
                                          {}};
    if (auto p = promised_value_of(x)) {
      argument.from = p->request();
      argument.output = p->output();
    } else {
      argument.sizes = x.sizes().vec();
    }
    record.arguments.push_back(std::move(argument));
  }
  auto result = std::shared_ptr<remote_call_node>(
    new remote_call_node(std::move(record)), ag::deleteNode);
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

call_result outgoing_call::promise(value args, const prediction& next) {
  // Copies: this rank goes on and may write to its tensors.
  put_arguments(true);
  auto request = std::make_shared<promised_request>();
  request->owner = owner_;
  request->module = module_;
  request->name = name_;
  request->number = book_.next_request(ex_);
  auto count = next.tensors.size();
  auto names = book_.next_names(count);
  byte_writer out;
  begin(out, wire_results::promise);
  out.boolean(false); // it draws no random numbers, and so needs none (R23)
  write(out, args);
  write(out, table_);
  out.u64(names);
  // What the caller took the last time comes with the answer.
  auto push = next.fetched && *next.fetched;
  request->pushed.assign(count, push);
  out.boolean(push);
  write(out, next.result);
  out.u32(static_cast<uint32_t>(count));
  for (auto& x : next.tensors) {
    out.u8(static_cast<uint8_t>(x.dtype));
    out.boolean(x.requires_grad);
  }
  auto c = make_call(out);
  request->why = c.why;
  request->arguments = promised_;
  std::vector<at::Tensor> tensors;
  auto record = make_record({ex_.rank().self(), request->number}, count);
  for (size_t i = 0; i < count; ++i) {
    object_id id{owner_, names + i, static_cast<uint32_t>(ex_.step().value)};
    auto& what = next.tensors[i];
    tensors.push_back(make_promise(
      std::make_shared<promised_value>(ex_.rank(), request,
                                       static_cast<uint32_t>(i), id, what,
                                       next.fetched),
      what.dtype));
    ex_.add_promise(tensors.back());
    if (what.requires_grad)
      record.outputs.push_back(static_cast<uint32_t>(i));
  }
  if (!record.outputs.empty() && at::GradMode::is_enabled()) {
    record.promise = request;
    auto outputs = record.outputs;
    auto node = make_node(std::move(record));
    static constexpr int64_t unknown[] = {-1};
    for (auto i : outputs) {
      auto nr = node->add_input_metadata(
        tensors[i].options(), c10::fromIntArrayRefSlow(unknown), false, false,
        next.tensors[i].dtype);
      ag::impl::set_gradient_edge(tensors[i], {node, nr});
    }
    request->node = node;
  }
  send_promise(ex_, std::move(c), request,
               [to = std::weak_ptr{request}](const payload& x) {
                 auto request = to.lock();
                 byte_reader in{x.bytes};
                 request->sizes.resize(in.count(4, "outputs"));
                 for (auto& sizes : request->sizes) {
                   sizes.resize(in.count(8, "dimensions"));
                   for (auto& size : sizes)
                     size = in.i64("size");
                 }
                 request->reaches = read_positions(in);
                 in.expect_end();
                 request->take_contents(x);
               });
  return {next.result, {}, unpacker{std::move(tensors)}};
}

// -- wait for the results -----------------------------------------------------

void outgoing_call::remember(const std::string& kind, bool predictable,
                             const value& result, const wire_table& results,
                             const std::vector<at::Tensor>& tensors) {
  if (kind.empty())
    return;
  predictable = predictable
                && std::all_of(results.begin(), results.end(), [](auto& x) {
                     return x.what == wire_tensor::kind::data;
                   });
  if (!predictable || !only_tensors(result, target_.op))
    return book_.remember(kind, {});
  auto next = std::make_shared<prediction>();
  next->result = result;
  next->fetched = std::make_shared<std::atomic<bool>>(false);
  for (size_t i = 0; i < tensors.size(); ++i)
    next->tensors.push_back({tensors[i].scalar_type(),
                             results[i].requires_grad, tensors[i].dim()});
  book_.remember(kind, {std::move(next)});
}

call_result outgoing_call::wait(value args, const std::string& kind) {
  put_arguments(false);
  byte_writer out;
  begin(out, target_.hold ? wire_results::hold : wire_results::push);
  write_stream(out, body_, ex_);
  write(out, args);
  write(out, table_);
  auto answer = ex_.park(make_call(out));
  // -- results ----------------------------------------------------------------
  byte_reader reader{answer.body.bytes};
  auto drew = read_stream(reader, answer.body, ex_);
  auto result = read_value(reader);
  auto changed = read_value(reader);
  auto results = read_table(reader);
  std::vector<std::pair<uint32_t, uint32_t>> written(
    reader.count(8, "written arguments"));
  for (auto& [argument, content] : written) {
    argument = reader.u32("written argument");
    content = reader.u32("written content");
  }
  auto stateful = reader.boolean("stateful");
  auto reaches = read_positions(reader);
  reader.expect_end();
  if (stateful)
    ex_.note_state();
  std::vector<at::Tensor> tensors(results.size());
  auto with_gradient = false;
  auto& objects = ex_.rank().objects();
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
        tensors[i] = objects.fetch(t.object).detach();
        objects.release({t.object});
        with_gradient = with_gradient || t.requires_grad;
        break;
      case wire_tensor::kind::argument:
        check_index(t.index, arguments_.size(), "argument");
        tensors[i] = arguments_[t.index];
        break;
      case wire_tensor::kind::parameter:
        check_index(t.index, map_.model().tensors.size(), "parameter");
        tensors[i] = map_.model().tensors[t.index].tensor;
        break;
    }
  }
  auto* list = changed.get_if<dict_value>();
  remember(kind,
           !drew && !stateful && written.empty()
             && (!list || list->items.empty()),
           result, results, tensors);
  if (with_gradient && at::GradMode::is_enabled()) {
    auto record = make_record(answer.id, results.size());
    std::vector<std::pair<size_t, uint32_t>> outputs;
    for (size_t i = 0; i < results.size(); ++i) {
      auto travelled = results[i].what == wire_tensor::kind::data
                       || results[i].what == wire_tensor::kind::object;
      if (travelled && results[i].requires_grad) {
        outputs.emplace_back(i, static_cast<uint32_t>(record.outputs.size()));
        record.outputs.push_back(static_cast<uint32_t>(i));
      }
    }
    record.reaches = std::move(reaches);
    auto node = make_node(std::move(record));
    for (auto& [i, nr] : outputs) {
      node->add_input_metadata(tensors[i]);
      ag::impl::set_gradient_edge(tensors[i], {node, nr});
    }
  }
  for (auto& [argument, content] : written) {
    check_index(argument, arguments_.size(), "argument");
    check_index(content, tensors.size(), "content");
    write_back(arguments_[argument], tensors[content], name_, argument);
  }
  call_result r{std::move(result), {}, unpacker{std::move(tensors)}};
  if (list)
    for (auto& [position, content] : list->items)
      if (auto* i = position.get_if<int64_t>())
        r.changed.emplace_back(static_cast<uint32_t>(*i), std::move(content));
  return r;
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
    throw error{error_code::unsupported, "a module of a model whose session "
                                         "ended is called"};
  auto& ex = executing("module '" + model->map->name(module) + "'");
  model->parameters->flush();
  outgoing_call out{ex, *model, owner, module, x, in.tensors()};
  auto all = value::tuple(std::move(args));
  auto& book = *model->promises;
  if (x.op == request_kind::get_attribute || x.op == request_kind::set_attribute)
    ex.note_state();
  if (!x.tensors_only || book.waits(*model->map, module, x))
    return out.wait(std::move(all), {});
  auto kind = kind_of_call(module, x, all, in.tensors());
  auto known = book.find(kind);
  if (known && known->next && book.may_promise(ex))
    return out.promise(std::move(all), *known->next);
  return out.wait(std::move(all), known ? std::string{} : kind);
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
  auto* ex = execution::current();
  auto alpha = stack[n - 1].toScalar();
  if (!a || !b || !ex || a->id().owner != b->id().owner
      || a->what().dtype != b->what().dtype || !alpha.isIntegral(false)
      || alpha.toLong() != 1)
    return false;
  auto model = ex->rank().model();
  prediction next;
  next.result = value::tensor(0);
  next.tensors.push_back({a->what().dtype,
                          at::GradMode::is_enabled()
                            && (xs[0].requires_grad() || xs[1].requires_grad()),
                          std::max(a->what().dim, b->what().dim)});
  call_target target;
  target.op = request_kind::add;
  std::vector<value> args{value::tensor(0), value::tensor(1)};
  if (xs[0].is_same(xs[1])) {
    xs.pop_back();
    args[1] = value::tensor(0);
  }
  outgoing_call out{*ex, *model, a->id().owner, a->request()->module, target, xs};
  auto result = out.promise(value::tuple(std::move(args)), next);
  torch::jit::drop(stack, 3);
  stack.emplace_back(result.tensors.tensor(0));
  return true;
}

} // namespace smp
