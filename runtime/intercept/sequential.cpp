#include "runtime/intercept/sequential.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/intercept/call_scope.hpp"
#include "runtime/intercept/shared_call.hpp"
#include "runtime/intercept/trace/trace_notes.hpp"
#include "runtime/model/call_translation.hpp"
#include "runtime/model/hook.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/module_facts.hpp"
#include "runtime/sharing/forward_form.hpp"
#include "tp/distributed_module.hpp"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>

namespace smp {

namespace {

// -- access to AnyModule::content_ --------------------------------------------
// An explicit instantiation may name private members: the only legal way to
// wrap a child whose type is unknown here.

using content_pointer = std::unique_ptr<torch::nn::AnyModulePlaceholder>
  torch::nn::AnyModule::*;

template <content_pointer Member>
struct content_access {
  friend content_pointer any_module_content() {
    return Member;
  }
};

content_pointer any_module_content();

template struct content_access<&torch::nn::AnyModule::content_>;

std::unique_ptr<torch::nn::AnyModulePlaceholder>&
content(torch::nn::AnyModule& x) {
  return x.*any_module_content();
}

// -- erased values ------------------------------------------------------------

/// Types that may cross between children of a Sequential; append only.
using carried_types = std::tuple<
  at::Tensor, std::vector<at::Tensor>, std::optional<at::Tensor>,
  std::tuple<at::Tensor, at::Tensor>,
  std::tuple<at::Tensor, at::Tensor, at::Tensor>,
  std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>,
  std::pair<at::Tensor, at::Tensor>, bool, int64_t, int, double, float,
  std::string>;

constexpr size_t num_carried = std::tuple_size_v<carried_types>;

template <size_t I = 0>
value put_any(packer& out, torch::nn::AnyValue& x) {
  if constexpr (I == num_carried) {
    out.refuse("a Sequential cannot carry the type "
               + c10::demangle(x.type_info().name())
               + " between ranks; use tensors or tuples of tensors");
  } else {
    using type = std::tuple_element_t<I, carried_types>;
    if (auto* y = x.try_get<type>())
      return value::tuple(
        {value::of(static_cast<int64_t>(I)), pack<type>::put(out, *y)});
    return put_any<I + 1>(out, x);
  }
}

template <size_t I = 0>
torch::nn::AnyValue get_any(unpacker& in, int64_t index, const value& x) {
  if constexpr (I == num_carried) {
    throw error{error_code::protocol, "unknown type in a Sequential"};
  } else {
    using type = std::tuple_element_t<I, carried_types>;
    if (index == static_cast<int64_t>(I))
      return torch::nn::AnyValue{pack<type>::get(in, x)};
    return get_any<I + 1>(in, index, x);
  }
}

/// @returns the tensors in `xs`, as far as they can be sent
std::vector<at::Tensor> tensors_in(std::span<torch::nn::AnyValue> xs,
                                   const char* what) {
  packer p;
  for (size_t i = 0; i < xs.size(); ++i) {
    value_path::scope place{p, what, i};
    note_if_unsendable([&] { put_any(p, xs[i]); });
  }
  return p.tensors();
}

/// Adds the tensors in `x` as a distributed module expects them: all, in order.
template <size_t I = 0>
void add_shared(std::vector<at::Tensor>& to, torch::nn::AnyValue& x) {
  if constexpr (I < num_carried) {
    using type = std::tuple_element_t<I, carried_types>;
    auto* y = x.try_get<type>();
    if (!y)
      return add_shared<I + 1>(to, x);
    if constexpr (detail::gives_tensors<type>)
      return detail::add_tensors(to, *y);
  }
  refuse_shared_call();
}

torch::nn::AnyValue get_any(unpacker& in, const value& x) {
  auto* parts = x.get_if<tuple_value>();
  auto* index = parts && parts->items.size() == 2
                  ? parts->items[0].get_if<int64_t>()
                  : nullptr;
  if (!index)
    throw error{error_code::protocol, "no typed value in a Sequential"};
  return get_any(in, *index, parts->items[1]);
}

/// Runs a child under the interceptors.
torch::nn::AnyValue run_child(torch::nn::AnyModulePlaceholder& x,
                              intercepted_call call, const hook_state& hook,
                              std::vector<torch::nn::AnyValue>&& arguments,
                              const row_place& place = {}) {
  auto* how = hook.distributed;
  // In a range, which is one request, this shows who waits for peers.
  call.part = how != nullptr;
  call_scope noted{call};
  if (how && !hook.translation) {
    auto object = x.ptr();
    std::vector<at::Tensor> tensors;
    for (auto& y : arguments)
      add_shared(tensors, y);
    auto found = run_shared(
      noted, *how, dynamic_cast<const void*>(object.get()), tensors, place);
    return hook.result ? hook.result(found)
                       : torch::nn::AnyValue{std::move(found.at(0))};
  }
  auto run = [&] {
    return how ? hook.translation->call_child(*how, std::move(arguments))
               : x.forward(std::move(arguments));
  };
  if (!noted.looks()) [[likely]]
    return run();
  auto object = x.ptr();
  noted.arguments(dynamic_cast<const void*>(object.get()),
                  tensors_in(arguments, "argument"));
  auto result = run();
  noted.results(tensors_in({&result, 1}, "result"));
  return result;
}

/// Wraps a child in a model that is only observed.
class observed_child : public torch::nn::AnyModulePlaceholder {
public:
  explicit observed_child(
    std::unique_ptr<torch::nn::AnyModulePlaceholder> inner)
    : torch::nn::AnyModulePlaceholder(typeid(observed_child)),
      inner_(std::move(inner)) {
    // nop
  }

  torch::nn::AnyValue
  forward(std::vector<torch::nn::AnyValue>&& arguments) override {
    return run_child(*inner_, {}, hook_state{}, std::move(arguments));
  }

  std::shared_ptr<torch::nn::Module> ptr() override {
    return inner_->ptr();
  }

  std::unique_ptr<torch::nn::AnyModulePlaceholder> copy() const override {
    return std::make_unique<observed_child>(inner_->copy());
  }

  std::unique_ptr<torch::nn::AnyModulePlaceholder>
  clone_module(std::optional<c10::Device> device) const override {
    return inner_->clone_module(device);
  }

private:
  std::unique_ptr<torch::nn::AnyModulePlaceholder> inner_;
};

// -- wrapper ------------------------------------------------------------------

/// The state that the wrappers of one Sequential share.
struct sequential_group {
  module_id id;
  torch::nn::SequentialImpl* object = nullptr;
  std::weak_ptr<torch::nn::Module> alive; // of `object`
  /// The model that it was partitioned with.
  std::weak_ptr<model_context> model;
  /// By child. Models hold pointers to them while more are pushed.
  std::deque<hook_state> hooks;

  /// Tells whether child `i` may pass its hidden states on as it holds them
  /// when no other code sees them: ranks share both children, and no user code
  /// runs when they are called.
  bool hands_on(size_t i) const {
    return i + 1 < hooks.size() && stands_in_rows(hooks[i])
           && stands_in_rows(hooks[i + 1]);
  }

private:
  static bool stands_in_rows(const hook_state& x) {
    return x.distributed && !x.translation && x.distributed->stands_in_rows();
  }
};

class sequential_child : public torch::nn::AnyModulePlaceholder {
public:
  sequential_child(std::unique_ptr<torch::nn::AnyModulePlaceholder> inner,
                   std::shared_ptr<sequential_group> group, uint32_t index)
    : torch::nn::AnyModulePlaceholder(typeid(sequential_child)),
      inner_(std::move(inner)),
      group_(std::move(group)),
      index_(index) {
    // nop
  }

  torch::nn::AnyValue
  forward(std::vector<torch::nn::AnyValue>&& arguments) override {
    auto& hook = group_->hooks[index_];
    auto* ex = running_call::current();
    if (index_ == 0)
      refuse_later_children();
    if (ex && ex->range().sequential == group_.get()
        && ex->range().next == index_)
      return pass(*ex, std::move(arguments));
    if (ex)
      check_range_consumed(*ex);
    if (!hook.local)
      return call(hook, ex, std::move(arguments));
    return run_child(*inner_, {hook.id, hook.ordered, false, hook.stream}, hook,
                     std::move(arguments), place_in_row(ex));
  }

  /// Runs the child as part of a range.
  /// @param served another rank requested it
  torch::nn::AnyValue serve(std::vector<torch::nn::AnyValue>&& arguments,
                            bool served, const row_place& place) {
    auto& hook = group_->hooks[index_];
    return run_child(*inner_, {hook.id, hook.ordered, served, hook.stream},
                     hook, std::move(arguments), place);
  }

  std::shared_ptr<torch::nn::Module> ptr() override {
    return inner_->ptr();
  }

  std::unique_ptr<torch::nn::AnyModulePlaceholder> copy() const override {
    return std::make_unique<sequential_child>(inner_->copy(), group_, index_);
  }

  std::unique_ptr<torch::nn::AnyModulePlaceholder>
  clone_module(std::optional<c10::Device> device) const override {
    // A clone belongs to no partition.
    return inner_->clone_module(device);
  }

  const std::shared_ptr<sequential_group>& group() const {
    return group_;
  }

private:
  /// Its place for a call that is not part of a range.
  row_place place_in_row(const running_call* ex) const {
    if (!ex || ex->row() != group_->object)
      return {};
    auto& hooks = group_->hooks;
    auto hands_on = [&](size_t i) {
      return group_->hands_on(i) && hooks[i].local && hooks[i + 1].local;
    };
    return {index_ == 0 || !hands_on(index_ - 1), !hands_on(index_)};
  }

  /// No rank owns a child that was pushed after the model was partitioned.
  void refuse_later_children() const {
    auto model = group_->model.lock();
    auto known = group_->hooks.size();
    if (!model || model != rank_context::current_model()
        || group_->alive.expired() || group_->object->size() == known)
      return;
    auto name = model->map->name(group_->id);
    throw error{error_code::unsupported,
                "'" + name + (name.empty() ? "" : ".") + std::to_string(known)
                  + "' was pushed into its Sequential after the model was "
                    "partitioned, so that no rank owns it: push all children "
                    "before the first step"};
  }

  /// This child already ran, as part of a range.
  torch::nn::AnyValue pass(running_call& ex,
                           std::vector<torch::nn::AnyValue>&& arguments) {
    auto* x = arguments.size() == 1 ? arguments[0].try_get<at::Tensor>()
                                    : nullptr;
    // `Sequential::forward` moves a value from child to child; a user's own
    // loop keeps it, and would have received the range's last value instead.
    if (arguments.size() != 1
        || (ex.range().exclusive && x && x->use_count() != 1)) {
      ex.end_range();
      refuse_own_loop();
    }
    ex.pass_child();
    return std::move(arguments[0]);
  }

  torch::nn::AnyValue call(hook_state& hook, running_call* ex,
                           std::vector<torch::nn::AnyValue>&& arguments) {
    auto last = index_ + 1;
    // Children on another rank form one request, those here one region.
    while (ex && last < group_->hooks.size() && !group_->hooks[last].local
           && group_->hooks[last].owner == hook.owner
           && group_->hooks[last].region == hook.region)
      ++last;
    packer in;
    std::vector<value> args;
    try {
      for (size_t i = 0; i < arguments.size(); ++i) {
        value_path::scope place{in, "argument", i};
        args.push_back(put_any(in, arguments[i]));
      }
    } catch (const error& err) {
      fail_call(hook.id, err);
    }
    call_target target;
    target.kind = request_kind::range;
    target.first = index_;
    target.last = last;
    target.training = group_->object->is_training();
    target.tensors_only = true;
    auto result = [&] {
      auto r = call_remote(hook.owner, group_->id, target, in, std::move(args));
      return get_any(r.tensors, r.result);
    }();
    if (last - index_ > 1 && ex) {
      auto* t = result.try_get<at::Tensor>();
      ex->begin_range(
        {group_.get(), index_ + 1, last, t && t->use_count() == 1});
    }
    return result;
  }

  [[noreturn]] static void refuse_own_loop() {
    throw error{error_code::unsupported,
                "the children of a Sequential on another rank, or of a "
                "checkpointed one, are called one by one, but several run as "
                "one: call its forward, or make it a ModuleList of "
                "smp::submodule"};
  }

  friend void smp::check_range_consumed(running_call& ex);

  std::unique_ptr<torch::nn::AnyModulePlaceholder> inner_;
  std::shared_ptr<sequential_group> group_;
  uint32_t index_;
};

sequential_child* wrapper(torch::nn::AnyModule& x) {
  return dynamic_cast<sequential_child*>(content(x).get());
}

} // namespace

std::vector<hook_state*> intercept_children(torch::nn::SequentialImpl& x) {
  std::vector<hook_state*> result;
  if (x.is_empty())
    return result;
  std::shared_ptr<sequential_group> group;
  if (auto* first = wrapper(*x.begin())) {
    group = first->group();
  } else {
    group = std::make_shared<sequential_group>();
    group->object = &x;
    group->alive = x.weak_from_this();
  }
  // All of them, or those pushed since. (A copy has the group of its
  // original.)
  for (auto i = static_cast<uint32_t>(group->hooks.size());
       i < x.size() && group->object == &x; ++i) {
    auto& child = *(x.begin() + i);
    content(child) = std::make_unique<sequential_child>(
      std::move(content(child)), group, i);
    group->hooks.emplace_back();
  }
  for (auto& hook : group->hooks)
    result.push_back(&hook);
  return result;
}

void observe_children(torch::nn::SequentialImpl& x) {
  for (auto& child : x)
    content(child) = std::make_unique<observed_child>(
      std::move(content(child)));
}

void name_sequential(torch::nn::SequentialImpl& x, module_id id,
                     const std::shared_ptr<model_context>& model) {
  if (!x.is_empty())
    if (auto* child = wrapper(*x.begin())) {
      child->group()->id = id;
      child->group()->model = model;
    }
}

invocation run_range(torch::nn::Module& object, uint32_t first, uint32_t last,
                     bool served, unpacker& in, const std::vector<value>& args,
                     packer& out) {
  if (auto* foreign = dynamic_cast<foreign_module*>(&object))
    return foreign->run_range(first, last, served, in, args, out);
  auto* seq = dynamic_cast<torch::nn::SequentialImpl*>(&object);
  auto* head = seq && !seq->is_empty() ? wrapper(*seq->begin()) : nullptr;
  if (!head || first >= last || last > head->group()->hooks.size())
    throw error{error_code::protocol, "no such range of a Sequential"};
  std::vector<torch::nn::AnyValue> values;
  for (auto& x : args)
    values.push_back(get_any(in, x));
  if (SMP_FAULT("dropped-layer"))
    --last;
  auto& group = *head->group();
  for (auto i = first; i < last; ++i) {
    auto* child = wrapper(*(seq->begin() + i));
    // No other code sees the values between the children.
    const row_place place{i == first || !group.hands_on(i - 1),
                          i + 1 == last || !group.hands_on(i)};
    auto result = child->serve(std::move(values), served, place);
    values.clear();
    values.push_back(std::move(result));
  }
  value_path::scope place{out, "result"};
  return {put_any(out, values[0]), {}};
}

void check_range_consumed(running_call& ex) {
  if (ex.end_range())
    sequential_child::refuse_own_loop();
}

} // namespace smp
