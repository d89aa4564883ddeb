#include "runtime/session/gradient_buckets.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/session/sparse_mean.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

namespace smp {

namespace {

namespace ag = torch::autograd;

bool contains(const std::vector<uint32_t>& ascending, uint32_t x) {
  return std::binary_search(ascending.begin(), ascending.end(), x);
}

at::Tensor dense(const at::Tensor& x) {
  return x.is_sparse() ? x.to_dense() : x;
}

} // namespace

// -- hooks --------------------------------------------------------------------

/// Called for every gradient that a parameter gets. It dies with the parameter,
/// perhaps after everything else.
class gradient_buckets::hook final : public ag::PostAccumulateGradHook {
public:
  hook(const std::shared_ptr<gradient_buckets*>& of, entry& x)
    : of_(of), entry_(x) {
    // nop
  }

  void operator()(const ag::Variable&) override {
    if (auto alive = of_.lock())
      (*alive)->reached(entry_);
  }

private:
  std::weak_ptr<gradient_buckets*> of_;
  entry& entry_;
};

/// For a parameter that tensor-parallel ranks share, each rank has the sum
/// over the samples of all of them, if these differ, and needs the mean.
/// Scales the addend, not the gradient itself, which may hold sums of earlier
/// steps.
class gradient_buckets::share_of_slice final : public ag::FunctionPreHook {
public:
  share_of_slice(const std::shared_ptr<gradient_buckets*>& of, uint64_t peers)
    : of_(of), peers_(static_cast<double>(peers)) {
    // nop
  }

  ag::variable_list operator()(const ag::variable_list& xs) override {
    if (of_.expired() || !xs.at(0).defined())
      return xs;
    return {xs[0].div(peers_)};
  }

private:
  std::weak_ptr<gradient_buckets*> of_;
  double peers_;
};

gradient_buckets::gradient_buckets(const rank_context& rank,
                                   const model_map& map)
  : rank_(rank),
    shards_(rank),
    self_(std::make_shared<gradient_buckets*>(this)) {
  auto peers = rank.layout().size(comm_group::tp);
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& t = tensors[i].tensor;
    if (tensors[i].is_buffer || !map.owned(i) || !t.defined()
        || !ag::isDifferentiableType(t.scalar_type()))
      continue;
    auto& x = *entries_.emplace_back(std::make_unique<entry>());
    x.position = i;
    x.parameter = t;
    x.bytes = t.nbytes();
    if (auto* slice = map.slice(i)) {
      x.over = comm_group::rdp;
      x.bytes = t.element_size();
      for (auto n : slice->whole)
        x.bytes *= static_cast<uint64_t>(n);
      if (map.is_scaled_batch(i))
        ag::impl::add_hook(t, std::make_unique<share_of_slice>(self_, peers));
    }
    ag::impl::set_post_acc_grad_hooks(t, std::make_unique<hook>(self_, x));
  }
  std::vector<entry*> reversed;
  for (auto i = entries_.rbegin(); i != entries_.rend(); ++i)
    if ((*i)->parameter.requires_grad())
      reversed.push_back(i->get());
  lay_out(reversed);
}

gradient_buckets::~gradient_buckets() = default;

// -- memory -------------------------------------------------------------------

void gradient_buckets::make_memory(bucket& x) {
  if (x.memory.defined())
    return;
  int64_t size = 0;
  for (auto* e : x.entries)
    size += e->parameter.numel();
  auto options = x.entries.front()->parameter.options().requires_grad(false);
  x.memory = at::empty({size}, options);
  int64_t begin = 0;
  for (auto* e : x.entries) {
    auto n = e->parameter.numel();
    // A tensor with its own version, which detects changes, and which
    // `zero_grad` may detach: not a view in the sense of autograd.
    e->view = x.memory.narrow(0, begin, n)
                .view(e->parameter.sizes())
                .variable_data();
    begin += n;
  }
  note_bytes();
}

void gradient_buckets::note_bytes() {
  auto bytes = shards_.bytes();
  for (auto& b : buckets_)
    if (b.memory.defined())
      bytes += b.memory.nbytes();
  counts_.peak_bytes = std::max(counts_.peak_bytes, bytes);
}

// -- one step -----------------------------------------------------------------

auto gradient_buckets::mark_of(const at::Tensor& parameter) -> mark {
  auto& x = parameter.grad();
  if (!x.defined())
    return {};
  return {x.unsafeGetTensorImpl(),
          static_cast<uint64_t>(x.is_inference() ? 0 : x._version())};
}

bool gradient_buckets::is_changed(const entry& x) {
  return x.pending || mark_of(x.parameter) != x.before;
}

void gradient_buckets::begin_step(const plan& x) {
  plan_ = x;
  in_step_ = true;
  reached_in_step_ = 0;
  full_.clear();
  auto found = expected_.find(x.kind);
  auto* known = found != expected_.end() ? &found->second : nullptr;
  plan_.early = x.early && agreed_;
  for (size_t i = 0; i < entries_.size(); ++i) {
    auto& e = *entries_[i];
    e.before = mark_of(e.parameter);
    e.pending = e.pending && e.parameter.grad().defined();
    e.given.reset();
    e.changed = e.apart = false;
    e.reached = e.in_round = e.final_as = 0;
    e.expected = plan_.early ? expected_of(e, known, i) : 0;
  }
  for (auto& b : buckets_) {
    auto in_use = [](entry* e) {
      return e->view.defined() && e->parameter.grad().is_same(e->view);
    };
    // A program that dropped its gradients wants their memory back; one that
    // kept some of them wants these to stay as they are.
    if (std::ranges::none_of(b.entries, in_use)) {
      b.memory.reset();
      for (auto* e : b.entries)
        e->view.reset();
    }
    b.begun = 0;
    count_missing(b);
  }
}

void gradient_buckets::count_missing(bucket& x) {
  x.missing = 0;
  for (auto* e : x.entries) {
    e->in_round = 0;
    x.missing += e->expected > 0;
  }
}

void gradient_buckets::reached(entry& x) {
  if (!in_step_)
    return;
  ++x.reached;
  x.final_as = ++reached_in_step_;
  if (x.bucket == nowhere)
    return;
  auto& b = buckets_[x.bucket];
  if (b.begun > 0 && !b.shared)
    return;
  shards_.collect(false);
  adopt(x);
  // A sparse gradient leaves its bucket once the first step has reported it.
  auto stays = ordered_ || !x.parameter.grad().is_sparse();
  if (plan_.early && stays && ++x.in_round == x.expected && --b.missing == 0)
    full_.push_back(&b);
  begin_full();
}

/// Buckets that wait for slower replicas take extra memory. So with sharded
/// gradients a bucket begins only when little else is in flight; until then
/// gradients of later microbatches are added to it. Which ones these are
/// depends on timing, and so do the last digits of their sum: a program that
/// needs the same bits in each run must provide the memory.
void gradient_buckets::begin_full() {
  auto most = rank_.config().bucket_cap_mb << 20;
  auto bounded = !rank_.config().deterministic_server;
  while (!full_.empty()) {
    auto& b = *full_.front();
    auto waits = shards_.bytes_under_way();
    if (b.shared && bounded && waits > 0 && waits + b.bytes > most)
      return;
    full_.erase(full_.begin());
    ++counts_.begun_early;
    begin(b);
  }
}

/// The first gradient of a step moves into the bucket, and later ones are added
/// there. A gradient that the user keeps stays where it is.
void gradient_buckets::adopt(entry& x) {
  auto& gradient = x.parameter.mutable_grad();
  if (x.before.gradient != nullptr || !gradient.defined()
      || gradient.layout() != at::kStrided || gradient.is_same(x.view)
      || gradient.scalar_type() != x.parameter.scalar_type())
    return;
  at::NoGradGuard no_grad;
  make_memory(buckets_[x.bucket]);
  x.view.copy_(gradient);
  gradient = x.view;
}

void gradient_buckets::begin(bucket& x) {
  at::NoGradGuard no_grad;
  make_memory(x);
  for (auto* e : x.entries) {
    e->changed = e->changed || is_changed(*e);
    auto& gradient = e->parameter.mutable_grad();
    if (e->apart || !gradient.defined()) {
      e->view.zero_();
      continue;
    }
    if (!gradient.is_same(e->view))
      e->view.copy_(dense(gradient));
    // Gradients from here on are late, and easy to recognize.
    e->given = std::exchange(gradient, {});
  }
  send(x);
  ++x.begun;
  count_missing(x);
}

void gradient_buckets::send(bucket& x) {
  auto type = x.memory.scalar_type();
  auto hook = type == at::kFloat || type == at::kDouble ? plan_.hook
                                                        : comm_hook::allreduce;
  auto number = static_cast<uint64_t>(&x - buckets_.data());
  auto name = "smp.bucket." + std::to_string(number);
  if (x.shared) {
    std::vector<at::Tensor> parameters;
    for (auto* e : x.entries) {
      parameters.push_back(e->parameter);
      e->given.reset();
      e->view.reset();
    }
    shards_.begin(parameters, std::exchange(x.memory, {}), hook, x.over, name);
    note_bytes();
    return;
  }
  if (plan_.own_hook)
    return; // `finish` calls it
  if (hook != comm_hook::allreduce)
    x.compressed = x.memory.to(
      hook == comm_hook::fp16_compress ? at::kHalf : at::kBFloat16);
  x.done = start_mean(x.compressed.defined() ? x.compressed : x.memory, x.over,
                      name);
}

tensor_future gradient_buckets::start_mean(const at::Tensor& x,
                                           const comm_group& over,
                                           const std::string& name) {
  auto op = SMP_FAULT("summed-replicas") ? reduce_op::sum : reduce_op::mean;
  return async::allreduce_(x, over, op, name, call_time::of_session);
}

tensor_future gradient_buckets::start_alone(const at::Tensor& x,
                                            const entry& of) {
  return start_mean(x, of.over, "smp.gradient." + std::to_string(of.position));
}

gradient_report gradient_buckets::end_step() {
  in_step_ = false;
  full_.clear();
  gradient_report result;
  for (auto& b : buckets_) {
    auto has_more = std::ranges::any_of(
      b.entries, [](entry* x) { return x->parameter.grad().defined(); });
    result.begun.push_back(b.begun);
    result.rounds.push_back(b.shared ? b.begun + has_more : 1);
  }
  std::vector<const entry*> order;
  for (auto& x : entries_) {
    auto* b = x->bucket != nowhere ? &buckets_[x->bucket] : nullptr;
    auto begun = b && !b->shared && b->begun > 0;
    auto& gradient = x->parameter.grad();
    auto is_late = begun && gradient.defined();
    if (!begun)
      x->changed = x->changed || is_changed(*x);
    if (is_late)
      result.late.push_back(x->position);
    result.trained = result.trained || x->reached > 0
                     || (x->changed && !x->pending);
    if (x->changed || is_late)
      result.changed.push_back(x->position);
    if (auto& own = begun ? x->given : gradient;
        x->changed && own.defined() && own.is_sparse())
      result.sparse.push_back(x->position);
    if (x->reached > 0)
      order.push_back(x.get());
  }
  counts_.late_gradients += result.late.size();
  if (ordered_)
    return result;
  result.layout = layout_hash();
  std::ranges::sort(order, {}, [](auto* x) { return x->final_as; });
  for (auto* x : order)
    result.order.push_back(x->position);
  return result;
}

void gradient_buckets::average(const gradient_report& all,
                               const gradient_report& first, bool agreed) {
  at::NoGradGuard no_grad;
  std::vector<entry*> sparse;
  std::vector<entry*> alone;
  for (auto* x : all_of(all.changed)) {
    auto placed = x->bucket != nowhere && agreed;
    // A bucket already in flight includes its sparse gradients.
    auto is_sparse = contains(all.sparse, x->position)
                     && !(placed && all.begun.at(x->bucket) > 0);
    x->apart = is_sparse;
    if (is_sparse)
      sparse.push_back(x);
    else if (!placed)
      alone.push_back(x);
  }
  for (size_t i = 0; i < buckets_.size() && agreed; ++i) {
    auto wanted = [&](entry* x) {
      return !x->apart && contains(all.changed, x->position);
    };
    auto& b = buckets_[i];
    if (all.begun.at(i) > 0 || std::ranges::any_of(b.entries, wanted))
      while (b.begun < all.rounds.at(i))
        begin(b);
  }
  finish_begun(all);
  average_apart(alone);
  for (auto* x : sparse)
    if (rank_.layout().size(x->over) > 1)
      x->parameter.mutable_grad() = mean_of_sparse(
        rank_, x->over, x->parameter.grad(), x->parameter.sizes());
  std::set<const void*> changed;
  for (auto* x : all_of(all.changed)) {
    x->pending = false;
    if (!shards_.has(x->parameter))
      continue;
    changed.insert(x->parameter.unsafeGetTensorImpl());
    shards_.take(x->parameter, at::Tensor{x->parameter.grad()});
  }
  shards_.end_step(changed);
  learn(all, first, agreed, sparse);
}

void gradient_buckets::drop(const gradient_report& all) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < buckets_.size(); ++i)
    while (i < all.begun.size() && buckets_[i].begun < all.begun[i])
      begin(buckets_[i]);
  finish_begun(all);
  shards_.drop();
}

void gradient_buckets::postpone(const gradient_report& all) {
  drop(all);
  for (auto* x : all_of(all.changed))
    x->pending = x->parameter.grad().defined();
}

/// @returns the gradients that came after their bucket had begun
auto gradient_buckets::take_late()
  -> std::vector<std::pair<entry*, at::Tensor>> {
  std::vector<std::pair<entry*, at::Tensor>> result;
  for (auto& b : buckets_)
    for (auto* x : b.entries)
      if (auto& gradient = x->parameter.mutable_grad();
          b.begun > 0 && !b.shared && !x->apart && gradient.defined())
        result.emplace_back(x, dense(std::exchange(gradient, {})));
  return result;
}

void gradient_buckets::finish_begun(const gradient_report& all) {
  auto mine = take_late();
  std::vector<std::pair<entry*, tensor_future>> late;
  for (auto* x : all_of(all.late)) {
    auto i = std::ranges::find(mine, x, &decltype(mine)::value_type::first);
    auto own = i != mine.end() ? i->second.contiguous()
                               : at::zeros_like(x->view);
    late.emplace_back(x, start_alone(own, *x));
  }
  for (auto& b : buckets_)
    if (b.begun > 0 && !b.shared)
      finish(b, all);
  shards_.collect(true);
  for (auto& [x, mean] : late)
    x->parameter.mutable_grad().add_(mean.get());
}

/// @throws error (user_code) if the program's hook returns something else
at::Tensor gradient_buckets::mean_by_hook(const at::Tensor& x,
                                          const comm_group& over) const {
  auto result = plan_.own_hook(x.flatten().clone(), over);
  if (!result.defined() || result.numel() != x.numel()
      || result.scalar_type() != x.scalar_type())
    throw error{
      error_code::user_code,
      fmt::format("the comm hook of the program got {} {} and has to "
                  "return as many, but returned {}",
                  x.numel(), c10::toString(x.scalar_type()),
                  !result.defined()
                    ? "nothing"
                    : fmt::format("{} {}", result.numel(),
                                  c10::toString(result.scalar_type())))};
  return result.view(x.sizes());
}

void gradient_buckets::finish(bucket& x, const gradient_report& all) {
  if (plan_.own_hook)
    x.memory.copy_(mean_by_hook(x.memory, x.over));
  else
    x.done.get();
  if (x.compressed.defined())
    x.memory.copy_(std::exchange(x.compressed, {}));
  for (auto* e : x.entries) {
    auto given = std::exchange(e->given, {});
    if (e->apart || (!given.defined() && !contains(all.changed, e->position)))
      continue;
    // A gradient that the user holds stays the same tensor.
    auto keeps = given.defined() && given.layout() == at::kStrided
                 && !given.is_same(e->view);
    if (keeps)
      given.copy_(e->view);
    e->parameter.mutable_grad() = keeps ? given : e->view;
  }
  x.begun = 0;
}

auto gradient_buckets::take_counts() -> counts {
  auto result = std::exchange(counts_, {});
  result.buckets = buckets_.size();
  result.under_way = shards_.under_way();
  return result;
}

// -- what is in no bucket -----------------------------------------------------

void gradient_buckets::average_apart(const std::vector<entry*>& xs) {
  std::vector<std::pair<entry*, tensor_future>> under_way;
  for (auto* x : xs) {
    if (rank_.layout().size(x->over) == 1)
      continue;
    auto& gradient = x->parameter.grad();
    auto own = gradient.defined() ? dense(gradient).clone()
                                  : at::zeros_like(x->parameter);
    if (plan_.own_hook)
      x->parameter.mutable_grad() = mean_by_hook(own.contiguous(), x->over);
    else
      under_way.emplace_back(x, start_alone(own.contiguous(), *x));
  }
  for (auto& [x, mean] : under_way) {
    auto& gradient = x->parameter.mutable_grad();
    if (gradient.defined() && gradient.layout() == at::kStrided)
      gradient.copy_(mean.get());
    else
      gradient = mean.get();
  }
}

} // namespace smp
