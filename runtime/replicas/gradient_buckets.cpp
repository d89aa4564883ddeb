#include "runtime/replicas/gradient_buckets.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/sparse_mean.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/model/model_map.hpp"

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
    auto& tensor = tensors[i].tensor;
    if (tensors[i].is_buffer || !map.owned(i) || !tensor.defined()
        || !ag::isDifferentiableType(tensor.scalar_type()))
      continue;
    auto& member = *entries_.emplace_back(std::make_unique<entry>());
    member.position = i;
    member.parameter = tensor;
    member.bytes = tensor.nbytes();
    if (auto* slice = map.slice(i)) {
      member.over = comm_group::rdp;
      member.bytes = tensor.element_size();
      for (auto size : slice->whole)
        member.bytes *= static_cast<uint64_t>(size);
      if (map.is_scaled_batch(i))
        ag::impl::add_hook(tensor,
                           std::make_unique<share_of_slice>(self_, peers));
    }
    ag::impl::set_post_acc_grad_hooks(tensor,
                                      std::make_unique<hook>(self_, member));
  }
  std::vector<entry*> reversed;
  for (auto i = entries_.rbegin(); i != entries_.rend(); ++i)
    if ((*i)->parameter.requires_grad())
      reversed.push_back(i->get());
  lay_out(reversed);
}

gradient_buckets::~gradient_buckets() = default;

// -- memory -------------------------------------------------------------------

void gradient_buckets::make_memory(bucket& to) {
  if (to.memory.defined())
    return;
  int64_t size = 0;
  for (auto* member : to.entries)
    size += member->parameter.numel();
  auto options = to.entries.front()->parameter.options().requires_grad(false);
  to.memory = at::empty({size}, options);
  int64_t begin = 0;
  for (auto* member : to.entries) {
    auto elements = member->parameter.numel();
    // A tensor with its own version, which detects changes, and which
    // `zero_grad` may detach: not a view in the sense of autograd.
    member->view = to.memory.narrow(0, begin, elements)
                     .view(member->parameter.sizes())
                     .variable_data();
    begin += elements;
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

void gradient_buckets::begin_step(const plan& next) {
  plan_ = next;
  in_step_ = true;
  reached_in_step_ = 0;
  full_.clear();
  auto found = expected_.find(next.kind);
  auto* known = found != expected_.end() ? &found->second : nullptr;
  plan_.early = next.early && agreed_;
  for (size_t index = 0; index < entries_.size(); ++index) {
    auto& member = *entries_[index];
    member.before = mark_of(member.parameter);
    member.pending = member.pending && member.parameter.grad().defined();
    member.given.reset();
    member.changed = member.apart = false;
    member.reached = member.in_round = member.final_as = 0;
    member.expected = plan_.early ? expected_of(member, known, index) : 0;
  }
  for (auto& bucket : buckets_) {
    auto in_use = [](entry* member) {
      return member->view.defined()
             && member->parameter.grad().is_same(member->view);
    };
    // A program that dropped its gradients wants their memory back; one that
    // kept some of them wants these to stay as they are.
    if (std::ranges::none_of(bucket.entries, in_use)) {
      bucket.memory.reset();
      for (auto* member : bucket.entries)
        member->view.reset();
    }
    bucket.begun = 0;
    count_missing(bucket);
  }
}

void gradient_buckets::count_missing(bucket& x) {
  x.missing = 0;
  for (auto* e : x.entries) {
    e->in_round = 0;
    x.missing += e->expected > 0;
  }
}

void gradient_buckets::reached(entry& member) {
  if (!in_step_)
    return;
  ++member.reached;
  member.final_as = ++reached_in_step_;
  if (member.bucket == nowhere)
    return;
  auto& bucket = buckets_[member.bucket];
  if (bucket.begun > 0 && !bucket.shared)
    return;
  shards_.collect(false);
  adopt(member);
  // A sparse gradient leaves its bucket once the first step has reported it.
  auto stays = ordered_ || !member.parameter.grad().is_sparse();
  if (plan_.early && stays && ++member.in_round == member.expected
      && --bucket.missing == 0)
    full_.push_back(&bucket);
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
    auto& next = *full_.front();
    auto waits = shards_.bytes_under_way();
    if (next.shared && bounded && waits > 0 && waits + next.bytes > most)
      return;
    full_.erase(full_.begin());
    ++counts_.begun_early;
    begin(next);
  }
}

/// The first gradient of a step moves into the bucket, and later ones are added
/// there. A gradient that the user keeps stays where it is.
void gradient_buckets::adopt(entry& member) {
  auto& gradient = member.parameter.mutable_grad();
  if (member.before.gradient != nullptr || !gradient.defined()
      || gradient.layout() != at::kStrided || gradient.is_same(member.view)
      || gradient.scalar_type() != member.parameter.scalar_type())
    return;
  at::NoGradGuard no_grad;
  make_memory(buckets_[member.bucket]);
  member.view.copy_(gradient);
  gradient = member.view;
}

void gradient_buckets::begin(bucket& full) {
  at::NoGradGuard no_grad;
  make_memory(full);
  for (auto* member : full.entries) {
    member->changed = member->changed || is_changed(*member);
    auto& gradient = member->parameter.mutable_grad();
    if (member->apart || !gradient.defined()) {
      member->view.zero_();
      continue;
    }
    if (!gradient.is_same(member->view))
      member->view.copy_(dense(gradient));
    // Gradients from here on are late, and easy to recognize.
    member->given = std::exchange(gradient, {});
  }
  send(full);
  ++full.begun;
  count_missing(full);
}

void gradient_buckets::send(bucket& full) {
  auto type = full.memory.scalar_type();
  auto hook = type == at::kFloat || type == at::kDouble ? plan_.hook
                                                        : comm_hook::allreduce;
  auto number = static_cast<uint64_t>(&full - buckets_.data());
  auto name = "smp.bucket." + std::to_string(number);
  if (full.shared) {
    std::vector<at::Tensor> parameters;
    for (auto* member : full.entries) {
      parameters.push_back(member->parameter);
      member->given.reset();
      member->view.reset();
    }
    shards_.begin(parameters, std::exchange(full.memory, {}), hook, full.over,
                  name);
    note_bytes();
    return;
  }
  if (plan_.own_hook)
    return; // `finish` calls it
  if (hook != comm_hook::allreduce)
    full.compressed = full.memory.to(
      hook == comm_hook::fp16_compress ? at::kHalf : at::kBFloat16);
  full.done = start_mean(
    full.compressed.defined() ? full.compressed : full.memory, full.over, name);
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
  for (auto& bucket : buckets_) {
    auto has_more = std::ranges::any_of(bucket.entries, [](entry* member) {
      return member->parameter.grad().defined();
    });
    result.begun.push_back(bucket.begun);
    result.rounds.push_back(bucket.shared ? bucket.begun + has_more : 1);
  }
  std::vector<const entry*> order;
  for (auto& member : entries_) {
    auto* bucket = member->bucket != nowhere ? &buckets_[member->bucket]
                                             : nullptr;
    auto begun = bucket && !bucket->shared && bucket->begun > 0;
    auto& gradient = member->parameter.grad();
    auto is_late = begun && gradient.defined();
    if (!begun)
      member->changed = member->changed || is_changed(*member);
    if (is_late)
      result.late.push_back(member->position);
    result.trained = result.trained || member->reached > 0
                     || (member->changed && !member->pending);
    if (member->changed || is_late)
      result.changed.push_back(member->position);
    if (auto& own = begun ? member->given : gradient;
        member->changed && own.defined() && own.is_sparse())
      result.sparse.push_back(member->position);
    if (member->reached > 0)
      order.push_back(member.get());
  }
  counts_.late_gradients += result.late.size();
  if (ordered_)
    return result;
  result.layout = layout_hash();
  std::ranges::sort(order, {}, [](auto* member) { return member->final_as; });
  for (auto* member : order)
    result.order.push_back(member->position);
  return result;
}

void gradient_buckets::average(const gradient_report& all,
                               const gradient_report& first, bool agreed) {
  at::NoGradGuard no_grad;
  std::vector<entry*> sparse;
  std::vector<entry*> alone;
  for (auto* member : all_of(all.changed)) {
    auto placed = member->bucket != nowhere && agreed;
    // A bucket already in flight includes its sparse gradients.
    auto is_sparse = contains(all.sparse, member->position)
                     && !(placed && all.begun.at(member->bucket) > 0);
    member->apart = is_sparse;
    if (is_sparse)
      sparse.push_back(member);
    else if (!placed)
      alone.push_back(member);
  }
  for (size_t number = 0; number < buckets_.size() && agreed; ++number) {
    auto wanted = [&](entry* member) {
      return !member->apart && contains(all.changed, member->position);
    };
    auto& bucket = buckets_[number];
    if (all.begun.at(number) > 0 || std::ranges::any_of(bucket.entries, wanted))
      while (bucket.begun < all.rounds.at(number))
        begin(bucket);
  }
  finish_begun(all);
  average_apart(alone);
  for (auto* member : sparse)
    if (rank_.layout().size(member->over) > 1)
      member->parameter.mutable_grad() = mean_of_sparse(
        rank_, member->over, member->parameter.grad(),
        member->parameter.sizes());
  std::set<const void*> changed;
  for (auto* member : all_of(all.changed)) {
    member->pending = false;
    if (!shards_.has(member->parameter))
      continue;
    changed.insert(member->parameter.unsafeGetTensorImpl());
    shards_.take(member->parameter, at::Tensor{member->parameter.grad()});
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
  for (auto* member : all_of(all.late)) {
    auto found = std::ranges::find(mine, member,
                                   &decltype(mine)::value_type::first);
    auto own = found != mine.end() ? found->second.contiguous()
                                   : at::zeros_like(member->view);
    late.emplace_back(member, start_alone(own, *member));
  }
  for (auto& bucket : buckets_)
    if (bucket.begun > 0 && !bucket.shared)
      finish(bucket, all);
  shards_.collect(true);
  for (auto& [member, mean] : late)
    member->parameter.mutable_grad().add_(mean.get());
}

/// @throws error (user_code) if the program's hook returns something else
at::Tensor gradient_buckets::mean_by_hook(const at::Tensor& gradients,
                                          const comm_group& over) const {
  auto result = plan_.own_hook(gradients.flatten().clone(), over);
  if (!result.defined() || result.numel() != gradients.numel()
      || result.scalar_type() != gradients.scalar_type())
    throw error{
      error_code::user_code,
      fmt::format("the comm hook of the program got {} {} and has to "
                  "return as many, but returned {}",
                  gradients.numel(), c10::toString(gradients.scalar_type()),
                  !result.defined()
                    ? "nothing"
                    : fmt::format("{} {}", result.numel(),
                                  c10::toString(result.scalar_type())))};
  return result.view(gradients.sizes());
}

void gradient_buckets::finish(bucket& sent, const gradient_report& all) {
  if (plan_.own_hook)
    sent.memory.copy_(mean_by_hook(sent.memory, sent.over));
  else
    sent.done.get();
  if (sent.compressed.defined())
    sent.memory.copy_(std::exchange(sent.compressed, {}));
  for (auto* member : sent.entries) {
    auto given = std::exchange(member->given, {});
    if (member->apart
        || (!given.defined() && !contains(all.changed, member->position)))
      continue;
    // A gradient that the user holds stays the same tensor.
    auto keeps = given.defined() && given.layout() == at::kStrided
                 && !given.is_same(member->view);
    if (keeps)
      given.copy_(member->view);
    member->parameter.mutable_grad() = keeps ? given : member->view;
  }
  sent.begun = 0;
}

auto gradient_buckets::take_counts() -> counts {
  auto result = std::exchange(counts_, {});
  result.buckets = buckets_.size();
  result.under_way = shards_.under_way();
  return result;
}

// -- what is in no bucket -----------------------------------------------------

void gradient_buckets::average_apart(const std::vector<entry*>& members) {
  std::vector<std::pair<entry*, tensor_future>> under_way;
  for (auto* member : members) {
    if (rank_.layout().size(member->over) == 1)
      continue;
    auto& gradient = member->parameter.grad();
    auto own = gradient.defined() ? dense(gradient).clone()
                                  : at::zeros_like(member->parameter);
    if (plan_.own_hook)
      member->parameter.mutable_grad() = mean_by_hook(own.contiguous(),
                                                      member->over);
    else
      under_way.emplace_back(member, start_alone(own.contiguous(), *member));
  }
  for (auto& [member, mean] : under_way) {
    auto& gradient = member->parameter.mutable_grad();
    if (gradient.defined() && gradient.layout() == at::kStrided)
      gradient.copy_(mean.get());
    else
      gradient = mean.get();
  }
}

} // namespace smp
