#include "runtime/calls/object_store.hpp"

#include "runtime/calls/messages.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/wait.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace smp {

namespace {

std::string name_of(object_id x) {
  return "object " + std::to_string(x.number) + " of step "
         + std::to_string(x.generation) + " of rank "
         + std::to_string(x.owner.value);
}

failure unknown(object_id x) {
  return {error_code::protocol,
          x.owner,
          {},
          name_of(x) + " is not held there: never was, or released"};
}

} // namespace

// -- what a rank knows --------------------------------------------------------

struct object_store::held_tensor {
  at::Tensor tensor;
  tensor_ref bytes;
  uint32_t holders = 0;
  std::vector<rank_id> released_by;
};

struct object_store::fetching : completion {
  at::Tensor tensor;     // once done
  bool released = false; // drop it as soon as it is done
};

object_store::object_store(fabric& x) : fabric_(x) {
  // nop
}

object_store::~object_store() {
  clear();
}

// -- what this rank holds -----------------------------------------------------

void object_store::hold(object_id id, at::Tensor x, uint32_t holders) {
  auto bytes = to_tensor_ref(x, false);
  std::lock_guard guard{mutex_};
  held_[id] = {std::move(x), std::move(bytes), holders, {}};
}

/// @returns a tensor to destroy after releasing the lock: it may hold an
/// autograd graph whose nodes release objects themselves
at::Tensor object_store::release_held(rank_id by, object_id id) {
  auto i = held_.find(id);
  if (i == held_.end())
    return {};
  auto& ranks = i->second.released_by;
  if (std::find(ranks.begin(), ranks.end(), by) == ranks.end())
    ranks.push_back(by);
  return ranks.size() < i->second.holders
           ? at::Tensor{}
           : std::move(held_.extract(i).mapped().tensor);
}

std::optional<at::Tensor> object_store::find(object_id id) const {
  if (is_result_name(id) && id.owner == fabric_.self()) {
    auto result = named_.find(id);
    return result.defined() ? std::optional{std::move(result)} : std::nullopt;
  }
  std::lock_guard guard{mutex_};
  if (auto i = held_.find(id); i != held_.end())
    return i->second.tensor;
  auto i = fetched_.find(id);
  if (i == fetched_.end() || !i->second->tensor.defined())
    return std::nullopt;
  return i->second->tensor;
}

// -- fetching -----------------------------------------------------------------

at::Tensor object_store::fetch(object_id id) {
  if (id.owner == fabric_.self()) {
    if (auto result = find(id))
      return *std::move(result);
    throw error{unknown(id)};
  }
  auto f = join(id);
  try {
    waiter::current().wait(f, {name_of(id), id.owner});
  } catch (...) {
    forget_failed(id, f);
    throw;
  }
  return f->tensor;
}

/// @returns the fetch of `id` that is in flight or done, or begins one.
object_store::fetching_ptr object_store::join(object_id id) {
  fetching_ptr result;
  {
    std::lock_guard guard{mutex_};
    if (auto i = lost_.find(id.owner); i != lost_.end())
      throw error{i->second};
    auto& f = fetched_[id];
    if (f != nullptr)
      return f;
    f = std::make_shared<fetching>();
    result = f;
  }
  // The store may be destroyed before the fabric calls back.
  send(id.owner, object_fetch{without_owner(id)},
       [weak = std::weak_ptr{result}](const failure& why) {
         if (auto f = weak.lock(); f && why)
           f->fail(why);
       });
  return result;
}

/// A failed fetch must not answer later callers.
void object_store::forget_failed(object_id id, const fetching_ptr& x) {
  std::lock_guard guard{mutex_};
  if (auto i = fetched_.find(id);
      i != fetched_.end() && i->second == x && x->done())
    fetched_.erase(i);
}

/// Ends the fetch of `id`, if there is one, with `x` or with `why`.
void object_store::finish(object_id id, at::Tensor x, failure why) {
  fetching_ptr f;
  {
    std::lock_guard guard{mutex_};
    auto i = fetched_.find(id);
    if (i == fetched_.end() || i->second->done())
      return;
    f = i->second;
    if (!why)
      f->tensor = std::move(x);
    if (why || f->released)
      fetched_.erase(i);
  }
  if (why)
    f->fail(std::move(why));
  else
    f->set();
}

void object_store::answer(rank_id to, object_id id) {
  if (is_result_name(id)) {
    if (auto x = named_.ask(to, id); x && x->why)
      refuse(to, id, x->why);
    else if (x)
      answer(to, id, x->bytes);
    return;
  }
  std::optional<tensor_ref> bytes;
  {
    std::lock_guard guard{mutex_};
    if (auto i = held_.find(id); i != held_.end())
      bytes = i->second.bytes;
  }
  if (bytes)
    answer(to, id, *bytes);
  else
    refuse(to, id, unknown(id));
}

void object_store::answer(rank_id to, object_id id, const tensor_ref& bytes) {
  send(to, object_content{without_owner(id), bytes});
}

void object_store::refuse(rank_id to, object_id id, const failure& why) {
  send(to, object_refusal{without_owner(id), why});
}

void object_store::answer(const named_results::askers& xs, const failure& why) {
  for (auto& [rank, id] : xs)
    refuse(rank, id, why);
}

// -- results with a name ------------------------------------------------------

void object_store::put(object_id id, microbatch_id m, at::Tensor x) {
  auto bytes = to_tensor_ref(x, false);
  for (auto& [rank, y] : named_.put(id, m, std::move(x), bytes))
    answer(rank, y, bytes);
}

completion_ptr object_store::want(object_id id) {
  if (id.owner == fabric_.self()) {
    if (auto result = named_.arrival(id))
      return result;
    auto here = std::make_shared<completion>();
    here->set();
    return here;
  }
  try {
    return join(id);
  } catch (const error& e) {
    auto lost = std::make_shared<completion>();
    lost->fail(e.cause());
    return lost;
  }
}

completion_ptr object_store::gather(const std::vector<object_id>& ids,
                                    step_id s, microbatch_id m) {
  std::vector<completion_ptr> missing;
  for (auto id : ids) {
    if (id.owner != fabric_.self()) {
      std::lock_guard guard{mutex_};
      gathered_[{s, m}].push_back(id);
    }
    if (auto x = want(id); !x->done() || x->cause())
      missing.push_back(std::move(x));
  }
  return missing.empty() ? nullptr : all_of(missing);
}

std::optional<object_id>
object_store::first_missing(const std::vector<object_id>& ids) const {
  auto i = std::find_if(ids.begin(), ids.end(),
                        [this](auto id) { return !find(id); });
  return i == ids.end() ? std::nullopt : std::optional{*i};
}

at::Tensor object_store::take(object_id id) {
  if (id.owner == fabric_.self())
    return named_.find(id);
  std::lock_guard guard{mutex_};
  auto i = fetched_.find(id);
  if (i == fetched_.end())
    return {};
  auto result = i->second->tensor;
  fetched_.erase(i);
  return result;
}

void object_store::forget(const std::vector<object_id>& ids) {
  std::vector<fetching_ptr> gone;
  {
    std::lock_guard guard{mutex_};
    for (auto id : ids)
      if (auto i = fetched_.find(id); i != fetched_.end()) {
        gone.push_back(std::move(i->second));
        fetched_.erase(i);
      }
  }
  // A no-op if it arrived; else nothing needs it any more.
  for (auto& x : gone)
    x->fail({error_code::cancelled, fabric_.self(), {}, "the step is over"});
}

void object_store::drop(const std::vector<object_id>& ids) {
  for (auto id : ids)
    if (id.owner == fabric_.self())
      named_.drop(id);
  forget(ids);
}

void object_store::end_microbatch(step_id s, microbatch_id m) {
  named_.drop(s, m);
  std::vector<object_id> ids;
  {
    std::lock_guard guard{mutex_};
    if (auto x = gathered_.extract({s, m}))
      ids = std::move(x.mapped());
  }
  forget(ids);
}

void object_store::fail_step(step_id s, const failure& why) {
  answer(named_.fail_step(s, why), why);
}

void object_store::end_step(step_id s) {
  answer(named_.end_step(s),
         {error_code::cancelled, fabric_.self(), {}, "the step is over"});
  std::vector<object_id> ids;
  {
    std::lock_guard guard{mutex_};
    gathered_.clear();
    for (auto& [id, x] : fetched_)
      if (is_result_name(id) && id.generation <= generation_of(s))
        ids.push_back(id);
  }
  forget(ids);
}

void object_store::send(rank_id to, const object_message& x,
                        fabric::sent_callback done) {
  fabric_.send(to, {message_kind::object, to_payload(x)}, std::move(done));
}

// -- letting go ---------------------------------------------------------------

void object_store::release(std::vector<object_id> ids) {
  std::map<rank_id, std::vector<object_id>> remote;
  std::vector<at::Tensor> gone;
  {
    std::lock_guard guard{mutex_};
    for (auto id : ids) {
      if (id.owner == fabric_.self()) {
        gone.push_back(release_held(id.owner, id));
        continue;
      }
      remote[id.owner].push_back(id);
      auto i = fetched_.find(id);
      if (i == fetched_.end())
        continue;
      if (i->second->done()) {
        gone.push_back(i->second->tensor);
        fetched_.erase(i);
      } else { // a caller here still waits for it
        i->second->released = true;
      }
    }
  }
  for (auto& [owner, xs] : remote) {
    object_release x;
    for (auto id : xs)
      x.ids.push_back(without_owner(id));
    send(owner, x);
  }
}

void object_store::withdraw(step_id s) {
  std::map<object_id, held_tensor> gone;
  std::lock_guard guard{mutex_};
  for (auto i = held_.begin(); i != held_.end();) {
    auto next = std::next(i);
    if (i->first.generation == generation_of(s))
      gone.insert(held_.extract(i));
    i = next;
  }
}

void object_store::clear() {
  std::map<object_id, fetching_ptr> fetched;
  std::map<object_id, held_tensor> gone;
  {
    std::lock_guard guard{mutex_};
    fetched.swap(fetched_);
    gone.swap(held_);
  }
  for (auto& [id, f] : fetched)
    f->fail({error_code::cancelled,
             id.owner,
             {},
             name_of(id) + " is not needed any more"});
}

// -- what comes in ------------------------------------------------------------

void object_store::deliver(rank_id from, message x) {
  std::optional<held_object> asked;
  try {
    asked = answered_fetch(x.body);
    auto what = from_payload<object_message>(x.body, "object message");
    std::visit([&](auto& y) { handle(from, y); }, what);
  } catch (const std::exception& e) {
    ++malformed_;
    if (!asked)
      return;
    auto id = asked->of(from);
    finish(id, {},
           {error_code::protocol,
            from,
            {},
            name_of(id) + " came damaged: " + e.what()});
  }
}

void object_store::handle(rank_id from, const object_fetch& x) {
  answer(from, x.id.of(fabric_.self()));
}

void object_store::handle(rank_id from, const object_content& x) {
  finish(x.id.of(from), to_tensor(x.content), {});
}

void object_store::handle(rank_id from, const object_refusal& x) {
  finish(x.id.of(from), {}, x.why);
}

void object_store::handle(rank_id from, const object_release& x) {
  std::vector<at::Tensor> gone;
  std::lock_guard guard{mutex_};
  for (auto& id : x.ids)
    gone.push_back(release_held(from, id.of(fabric_.self())));
}

void object_store::fail(rank_id owner, const failure& x) {
  std::vector<fetching_ptr> failed;
  {
    std::lock_guard guard{mutex_};
    lost_.emplace(owner, x);
    for (auto i = fetched_.begin(); i != fetched_.end();) {
      if (i->first.owner == owner) {
        failed.push_back(std::move(i->second));
        i = fetched_.erase(i);
      } else {
        ++i;
      }
    }
  }
  for (auto& f : failed)
    f->fail(x);
}

// -- for leak tests and reports -----------------------------------------------

size_t object_store::held() const {
  auto named = named_.size();
  std::lock_guard guard{mutex_};
  return held_.size() + named;
}

size_t object_store::cached() const {
  std::lock_guard guard{mutex_};
  return fetched_.size();
}

uint64_t object_store::malformed() const noexcept {
  return malformed_;
}

} // namespace smp
