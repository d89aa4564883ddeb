#include "runtime/calls/promised_call.hpp"

#include "actors/order/order_book.hpp"
#include "actors/protocol/request_number.hpp"
#include "actors/server/executor.hpp"
#include "runtime/base/call_context.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/calls/backward_node.hpp"
#include "runtime/calls/caller.hpp"
#include "runtime/calls/object_store.hpp"
#include "runtime/execution/running_call.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/model/module_list.hpp"
#include "runtime/values/tensor_bridge.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace smp {

namespace {

bool fixes_order(const running_call* x) {
  return x && x->rank().records().fixed_order();
}

/// Waits until `x` is done, which needs the replies to `promises`. In a step
/// with a fixed order this always parks, and continues in its turn: whether
/// `x` is done by now depends on timing.
void await_answers(const completion_ptr& x, const wait_reason& why,
                   std::vector<uint64_t> promises) {
  auto* ex = running_call::current();
  if (!fixes_order(ex))
    return waiter::current().wait(x, why);
  auto c = wait_call(ex->in_backward() ? phase::backward : phase::forward, x,
                     why);
  c.until = std::move(promises);
  ex->executor().park(std::move(c));
}

/// @returns the strides of axes of more than one element: the others depend on
/// timing, as autograd adds a gradient to another one in place, keeping its
/// strides, unless a message still holds that one
std::vector<int64_t> order_of_axes(const tensor_meta& x) {
  std::vector<int64_t> result;
  int64_t next = 1;
  for (auto i = x.shape.size(); i-- > 0;) {
    if (x.shape[i] != 1)
      result.push_back(x.strides.empty() ? next : x.strides[i]);
    next *= std::max<int64_t>(x.shape[i], 1);
  }
  return result;
}

std::string describe(const std::vector<int64_t>& xs) {
  return fmt::format("[{}]", fmt::join(xs, ", "));
}

std::string describe(const tensor_meta& x) {
  return describe(x.shape)
         + (x.strides.empty() ? "" : " with strides " + describe(x.strides));
}

/// The reply to `x` has arrived: its node learns the shapes of its gradients.
void complete_node(const sent_request& x) {
  if (auto node = std::dynamic_pointer_cast<backward_node>(x.node.lock()))
    node->set_shapes(x.results);
}

} // namespace

// -- what callers take --------------------------------------------------------

std::optional<bool> taken_results::find(size_t position) const {
  std::lock_guard guard{mutex_};
  return position < taken_.size() ? taken_[position] : std::nullopt;
}

bool taken_results::note(size_t position, bool taken) {
  std::lock_guard guard{mutex_};
  if (taken_.size() <= position)
    taken_.resize(position + 1);
  return std::exchange(taken_[position], taken) != taken;
}

std::vector<uint32_t> taken_results::left() const {
  std::lock_guard guard{mutex_};
  std::vector<uint32_t> result;
  for (uint32_t i = 0; i < taken_.size(); ++i)
    if (taken_[i] == false)
      result.push_back(i);
  return result;
}

// -- requests and values ------------------------------------------------------

void sent_request::take(const call_reply& x) {
  auto refuse = [this](const std::string& what) {
    throw error{error_code::protocol, "answer of '" + name + "': " + what};
  };
  if (waited && pushed.empty())
    pushed.resize(x.tensors.size());
  if (x.tensors.size() != pushed.size())
    refuse(std::to_string(x.tensors.size()) + " results instead of "
           + std::to_string(pushed.size()));
  contents.resize(pushed.size());
  std::vector<tensor_meta> told;
  for (size_t i = 0; i < pushed.size(); ++i) {
    auto& y = x.tensors[i];
    auto& meta = told.emplace_back(y.meta);
    auto carried = y.what == remote_tensor::kind::data;
    if (waited && y.what == remote_tensor::kind::held && i >= x.named)
      refuse("name of result " + std::to_string(i) + " does not exist");
    else if (waited)
      pushed[i] = carried;
    else if (y.what != remote_tensor::kind::held && !carried)
      refuse("result " + std::to_string(i) + " is missing");
    else if (carried != pushed[i])
      refuse("result " + std::to_string(i)
             + (carried ? " comes unasked" : " does not come"));
    if (std::ranges::any_of(meta.shape, [](auto n) { return n < 0; }))
      refuse("result " + std::to_string(i) + " has no sizes");
    if (carried)
      contents[i] = y.content;
  }
  reaches = x.reaches;
  std::lock_guard guard{mutex_};
  results = std::move(told);
}

std::optional<tensor_meta> sent_request::known(size_t result) {
  std::lock_guard guard{mutex_};
  if (result < results.size())
    return results[result];
  if (!recorded || result >= recorded->results.size())
    return std::nullopt;
  foretold_.insert(result);
  return recorded->results[result];
}

std::optional<std::string> sent_request::difference() {
  std::lock_guard guard{mutex_};
  for (auto i : foretold_) {
    auto& before = recorded->results[i];
    if (results[i].shape != before.shape
        || order_of_axes(results[i]) != order_of_axes(before))
      return "the record has " + describe(before) + " as result "
             + std::to_string(i) + ", this step " + describe(results[i]);
  }
  return std::nullopt;
}

void sent_request::forget(size_t result) {
  if (done() && result < contents.size())
    contents[result].reset();
}

promised_value::promised_value(const rank_context& rank, sent_request_ptr from,
                               uint32_t output, object_id id, tensor_meta what,
                               taken_results_ptr taken)
  : rank_(rank.weak_from_this()),
    request_(std::move(from)),
    output_(output),
    id_(id),
    what_(std::move(what)),
    taken_(std::move(taken)) {
  told_.insert(id.owner);
}

promised_value::~promised_value() {
  // Its content was sent, but never read.
  if (!content_ && request_->pushed.at(output_))
    note_taken(false);
  if (auto here = model())
    for (auto x : told_)
      here->promises->release(x, id_);
  request_->forget(output_);
}

/// @returns the model, or null if the step that made this is over.
std::shared_ptr<model_context> promised_value::model() const {
  auto rank = rank_.lock();
  return rank && generation_of(rank->step()) == id_.generation ? rank->model()
                                                               : nullptr;
}

void promised_value::note_taken(bool x) {
  // Later steps differ: their reply will carry it, or no longer does so.
  if (!taken_ || !taken_->note(output_, x) || x == request_->pushed.at(output_))
    return;
  if (auto here = model())
    here->promises->note_learnt();
}

void promised_value::tell(rank_id x) {
  std::lock_guard guard{mutex_};
  told_.insert(x);
}

std::vector<int64_t> promised_value::sizes() {
  if (auto x = request_->known(output_); x && !request_->done())
    return x->shape;
  await(request_);
  complete_node(*request_);
  return request_->results.at(output_).shape;
}

std::optional<std::vector<int64_t>> promised_value::strides() {
  // The sizes of a gradient are known before its strides.
  auto x = request_->known(output_);
  return x ? std::optional{x->strides} : std::nullopt;
}

completion_ptr promised_value::content() {
  std::lock_guard guard{mutex_};
  if (content_)
    return content_;
  if (here()) {
    note_taken(true);
    return content_ = request_;
  }
  auto rank = rank_.lock();
  if (!rank || !model()) {
    auto late = std::make_shared<completion>();
    late->fail({error_code::unsupported, no_rank, request_->name,
                "a result is read after the end of its step"});
    return late;
  }
  note_taken(true);
  if (request_->pushed.at(output_))
    return content_ = request_;
  // Includes the reply: then the end of the phase need not wait for it.
  content_ = all_of({rank->objects().want(id_), request_});
  return content_;
}

void promised_value::wait() {
  auto x = content();
  if (!here())
    await(x);
}

bool promised_value::waits_in_order() const {
  return fixes_order(running_call::current()) && model();
}

void promised_value::await(const completion_ptr& x) const {
  // After its step there is no order to keep.
  if (model())
    await_answers(x, why(), {request_->number});
  else
    waiter::current().wait(x, why());
}

at::Tensor promised_value::take() {
  auto rank = rank_.lock();
  at::Tensor result;
  if (request_->pushed.at(output_))
    result = std::exchange(request_->contents.at(output_), {});
  else if (rank)
    result = rank->objects().take(id_);
  if (!result.defined())
    throw error{failure{error_code::internal, no_rank, request_->name,
                        "a fetched result is gone"}};
  complete_node(*request_);
  return result;
}

wait_reason promised_value::why() const {
  return request_->why;
}

promised_value_ptr promised_value_of(const at::Tensor& x) {
  return std::dynamic_pointer_cast<promised_value>(source_of(x));
}

// -- what a rank knows --------------------------------------------------------

void promise_book::set_waiting(const model_map& map,
                               const std::vector<std::string>& names) {
  const module_list named{map.model(), names};
  named.check("smp.no_promises");
  waiting_.clear();
  for (uint32_t i = 0; i < map.model().modules.size(); ++i)
    if (named.contains(i))
      waiting_.insert(i);
}

bool promise_book::waits(const model_map& map, module_id module,
                         const call_target& x) const {
  if (!on_)
    return true;
  if (waiting_.empty())
    return false;
  if (waiting_.contains(module.value))
    return true;
  if (x.kind != request_kind::range && x.kind != request_kind::method_range)
    return false;
  auto& children = map.model().modules.at(module.value).children;
  for (auto i = x.first; i < x.last && i < children.size(); ++i)
    if (waiting_.contains(children[i]))
      return true;
  return false;
}

std::shared_ptr<const recorded_call>
promise_book::recorded(const running_call& ex) const {
  return records_.sent(ex.id(), ex.requests());
}

bool promise_book::all_wait() const {
  std::lock_guard guard{mutex_};
  return all_wait_;
}

bool promise_book::promised() const {
  std::lock_guard guard{mutex_};
  return promised_;
}

std::optional<promise_book::memory> promise_book::find(const std::string& kind,
                                                       uint32_t place) {
  std::lock_guard guard{mutex_};
  auto& known = memories_.front().known;
  auto i = known.find(kind);
  if (all_wait_ || i == known.end())
    return std::nullopt;
  auto& [next, taken] = i->second;
  auto& there = taken[place];
  if (!there)
    there = std::make_shared<taken_results>();
  return memory{next, there};
}

namespace {

/// Tells whether `x` is a correct prediction of the result `y`.
bool foretells(const prediction& x, const prediction& y) {
  return x.result == y.result
         && std::equal(x.tensors.begin(), x.tensors.end(), y.tensors.begin(),
                       y.tensors.end(), [](auto& s, auto& t) {
                         return s.meta.dtype == t.meta.dtype
                                && s.meta.device == t.meta.device
                                && s.requires_grad == t.requires_grad;
                       });
}

} // namespace

void promise_book::remember(const std::string& kind, prediction_ptr next) {
  std::lock_guard guard{mutex_};
  auto [i, added] = memories_.front().known.emplace(kind,
                                                    memories::entry{next, {}});
  auto& known = i->second.next;
  auto wrong = !added && known && !(next && foretells(*known, *next));
  if (wrong)
    i->second = {};
  learnt_ = learnt_ || added || wrong;
}

void promise_book::note_learnt() {
  std::lock_guard guard{mutex_};
  learnt_ = true;
}

bool promise_book::learnt() const {
  std::lock_guard guard{mutex_};
  return learnt_;
}

void promise_book::reconsider() {
  std::lock_guard guard{mutex_};
  for (auto& x : memories_)
    std::erase_if(x.known, [](auto& y) { return !y.second.next; });
}

void promise_book::begin_step(uint64_t trainable, bool again, bool all_wait) {
  std::lock_guard guard{mutex_};
  all_wait_ = again || all_wait;
  learnt_ = again;
  promised_ = false;
  auto i = std::find_if(memories_.begin(), memories_.end(),
                        [&](auto& x) { return x.trainable == trainable; });
  if (i == memories_.end())
    i = memories_.insert(i, {trainable, {}});
  memories_.splice(memories_.begin(), memories_, i);
  if (memories_.size() > order_book::max_keys)
    memories_.pop_back();
  if (auto& known = memories_.front().known; known.size() > max_kinds)
    known.clear();
}

uint64_t promise_book::next_request(const running_call& ex) {
  auto known = recorded(ex);
  std::lock_guard guard{mutex_};
  promised_ = true;
  if (known && known->kind == call_kind::promise)
    return request_number(ex.step(), known->number);
  requests_ = std::max(requests_, records_.last_promise());
  return promise_number(ex.step(), ++requests_);
}

void promise_book::release(rank_id who, object_id x) {
  std::lock_guard guard{mutex_};
  releases_[who].push_back(x);
}

std::vector<object_id> promise_book::take_releases(rank_id who, step_id s) {
  std::lock_guard guard{mutex_};
  auto i = releases_.extract(who);
  if (!i)
    return {};
  std::erase_if(i.mapped(),
                [s](auto& x) { return x.generation != generation_of(s); });
  return std::move(i.mapped());
}

void promise_book::end_step() {
  std::lock_guard guard{mutex_};
  releases_.clear();
  requests_ = 0;
}

// -- kinds of calls -----------------------------------------------------------

namespace {

/// Replaces all numbers by the same one: calls that differ only in numbers
/// usually return the same kind of tensors.
void mask_numbers(value& x) {
  if (x.get_if<int64_t>())
    x = value::of(int64_t{0});
  else if (x.get_if<double>())
    x = value::of(0.0);
  else if (x.get_if<std::complex<double>>())
    x = value::of(std::complex<double>{});
  else if (auto* list = x.get_if<list_value>())
    for (auto& y : list->items)
      mask_numbers(y);
  else if (auto* tuple = x.get_if<tuple_value>())
    for (auto& y : tuple->items)
      mask_numbers(y);
  else if (auto* dict = x.get_if<dict_value>())
    for (auto& [key, y] : dict->items)
      mask_numbers(y);
}

} // namespace

std::string kind_of_call(module_id module, const call_target& x,
                         const value& args,
                         const std::vector<at::Tensor>& tensors) {
  byte_writer out;
  out.put(module);
  out.put(x.kind);
  out.put(x.invoker);
  out.put(x.name);
  out.put(x.first);
  out.put(x.last);
  out.put(x.training);
  out.put(call_context::current());
  auto masked = args;
  mask_numbers(masked);
  out.put(masked);
  for (auto& t : tensors) {
    auto p = promised_value_of(t);
    out.u8(static_cast<uint8_t>(p ? p->dtype() : t.scalar_type()));
    out.i64(p ? static_cast<int64_t>(p->dim()) : t.dim());
    out.u8(static_cast<uint8_t>(t.device().type()));
    out.put(t.requires_grad());
  }
  auto bytes = out.take();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// -- sending ------------------------------------------------------------------

namespace {

/// @throws error (unsupported) if sizes that code has read by now turn out to
/// be those of the replayed step only
void check_record(sent_request& x, microbatch_id m,
                  const std::shared_ptr<const rank_context>& rank) {
  auto how = x.difference();
  if (!how || !rank)
    return;
  auto& records = rank->records();
  records.misled();
  throw error{
    failure{error_code::unsupported, rank->self(), x.name,
            records.describe(m, *how) + " (write smp.static_mode = false)"}};
}

} // namespace

std::optional<call_reply> send(running_call& ex, call c,
                               const sent_request_ptr& x) {
  if (c.kind == call_kind::remote) {
    x->waited = true;
    auto answer = ex.executor().park(std::move(c));
    x->number = answer.id.number;
    x->why.asks = x->number;
    x->arguments.clear();
    auto reply = from_payload<call_reply>(answer.body, "reply");
    x->take(reply);
    x->set();
    return reply;
  }
  x->why.asks = x->number;
  c.number = x->number;
  c.why = x->why;
  auto answer = std::make_shared<awaited<response>>();
  answer->on_done([weak = std::weak_ptr{answer}, x, m = ex.microbatch(),
                   rank = ex.rank().weak_from_this()] {
    auto answer = weak.lock();
    auto why = answer->cause();
    x->arguments.clear();
    if (!why) {
      try {
        x->take(from_payload<call_reply>(
          awaited<response>::peek(answer, {}).body, "reply"));
        check_record(*x, m, rank.lock());
      } catch (const error& e) {
        why = e.cause();
      }
    }
    if (why)
      x->fail(std::move(why));
    else
      x->set();
  });
  c.answer = std::move(answer);
  ex.add_outstanding(x);
  ex.executor().send(std::move(c));
  // One request at a time in the whole pipeline, until there is an order. This
  // wait has no place in it.
  auto& records = ex.rank().records();
  if (records.fixed_order() && records.note().recorded)
    waiter::current().wait(x, x->why);
  return std::nullopt;
}

void fence(running_call& ex) {
  auto all = ex.take_outstanding();
  if (all.empty())
    return;
  std::vector<uint64_t> numbers;
  std::vector<std::pair<completion_ptr, wait_reason>> answers;
  for (auto& x : all) {
    numbers.push_back(x->number);
    answers.emplace_back(x, x->why);
  }
  await_answers(all_of({all.begin(), all.end()}),
                reason_of_all(std::move(answers)), std::move(numbers));
  for (auto& x : all)
    complete_node(*x);
}

void keep_promises_of(running_call& ex) {
  keep_promises(ex.take_promises());
}

} // namespace smp
