#include "runtime/replicas/gradient_shards.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/optimizer/gradient_rows.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>

namespace smp {

void gradient_shards::add(const std::vector<optimizer_shards::owners>& xs) {
  for (auto& x : xs) {
    auto me = rank_.layout().rank(x.over, rank_.self());
    shares_.push_back({x, x.begins[me], x.begins[me + 1], {}});
    by_parameter_[x.parameter.unsafeGetTensorImpl()] = &shares_.back();
  }
}

auto gradient_shards::find(const at::Tensor& parameter) const -> share* {
  auto i = by_parameter_.find(parameter.unsafeGetTensorImpl());
  return i == by_parameter_.end() ? nullptr : i->second;
}

// -- one step -----------------------------------------------------------------

void gradient_shards::begin(const std::vector<at::Tensor>& parameters,
                            at::Tensor memory, comm_hook hook,
                            const comm_group& over, const std::string& name) {
  if (hook != comm_hook::allreduce)
    memory = memory.to(hook == comm_hook::fp16_compress ? at::kHalf
                                                        : at::kBFloat16);
  auto me = rank_.layout().rank(over, rank_.self());
  round next;
  next.memory = std::move(memory);
  std::vector<uint64_t> roots;
  std::vector<int64_t> shares(rank_.layout().size(over)); // by owner
  int64_t at = 0;
  int64_t piece_begin = 0;
  auto cut = [&] {
    if (at > piece_begin)
      next.pieces.back().input = next.memory.narrow(0, piece_begin,
                                                    at - piece_begin);
    piece_begin = at;
  };
  for (auto& p : parameters) {
    auto& x = *find(p);
    auto& begins = x.owners.begins;
    for (uint64_t owner = 0; owner + 1 < begins.size(); ++owner) {
      auto rows = begins[owner + 1] - begins[owner];
      if (rows == 0)
        continue;
      auto size = p.numel() / begins.back() * rows;
      if (roots.empty() || roots.back() != owner) {
        cut();
        roots.push_back(owner);
        next.pieces.emplace_back();
      }
      if (owner == me)
        next.pieces.back().mine.emplace_back(&x, size);
      shares[owner] += size;
      at += size;
    }
  }
  cut();
  // With help, an owner of the share s receives (1 + s) (n - 1) / n of the
  // bucket in total, alone s (n - 1): no more than that, if this is at most 1.
  auto others = static_cast<int64_t>(shares.size()) - 1;
  auto load = std::ranges::max(shares) * others <= at ? root_load::equal
                                                      : root_load::alone;
  for (size_t i = 0; i < roots.size(); ++i)
    next.pieces[i].done = async::reduce(next.pieces[i].input, over, roots[i],
                                        reduce_op::mean, name,
                                        call_time::of_session, load);
  // Only after all have begun: a caller that waits for a rejected sum would
  // wait forever.
  under_way_.push_back(std::move(next));
}

void gradient_shards::collect(bool all) {
  for (auto i = under_way_.begin(); i != under_way_.end();) {
    auto done = std::ranges::all_of(i->pieces,
                                    [](auto& x) { return x.done.done(); });
    // Sums of one parameter are added in the order in which they began.
    if (!done && !all)
      return;
    finish(*i);
    i = under_way_.erase(i);
  }
}

void gradient_shards::finish(round& x) {
  at::NoGradGuard no_grad;
  for (auto& p : x.pieces) {
    auto sum = p.done.get();
    int64_t begin = 0;
    for (auto& [share, size] : p.mine) {
      auto& rows = share->owners.rows;
      auto part = sum.narrow(0, begin, size).view(rows.sizes());
      begin += size;
      if (share->sum.defined())
        share->sum.add_(part);
      else
        share->sum = part.to(rows.scalar_type(), false, true);
    }
  }
}

void gradient_shards::take(const at::Tensor& parameter,
                           const at::Tensor& gradient) {
  auto* x = find(parameter);
  parameter.mutable_grad().reset();
  if (x == nullptr || x->begin == x->end || !gradient.defined())
    return;
  auto rows = rows_of_gradient(gradient, x->begin, x->end);
  if (!rows.is_sparse())
    rows = rows.clone();
  if (x->sum.defined()) // dense does not add to sparse
    rows = x->sum.is_sparse() ? rows.add(x->sum) : x->sum.add(rows);
  x->sum = rows;
}

void gradient_shards::end_step(const std::set<const void*>& changed) {
  at::NoGradGuard no_grad;
  for (auto& x : shares_) {
    auto sum = std::exchange(x.sum, {});
    if (!sum.defined()
        || !changed.contains(x.owners.parameter.unsafeGetTensorImpl()))
      continue;
    auto& gradient = x.owners.rows.mutable_grad();
    if (!gradient.defined())
      gradient = sum;
    else if (gradient.is_sparse() && !sum.is_sparse())
      gradient = sum.add(gradient);
    else
      gradient.add_(sum);
  }
}

void gradient_shards::drop() {
  for (auto& x : shares_)
    x.sum.reset();
}

// -- what there is ------------------------------------------------------------

at::Tensor gradient_shards::of_rows(const at::Tensor& parameter) const {
  auto* x = find(parameter);
  return x != nullptr && x->begin < x->end ? x->owners.rows.grad()
                                           : at::Tensor{};
}

at::Tensor gradient_shards::whole(const at::Tensor& parameter) const {
  auto* found = find(parameter);
  if (found == nullptr)
    return parameter.grad();
  auto& x = *found;
  std::vector<tensor_ref> mine; // or nothing
  if (x.begin < x.end && x.owners.rows.grad().defined())
    mine.push_back(to_tensor_ref(x.owners.rows.grad().to_dense(), true));
  std::vector<at::Tensor> parts;
  for (auto& other : rank_.exchange().all_gather(
         rank_.layout().members(x.owners.over, rank_.self()),
         "smp.whole_gradient", to_payload(mine)))
    for (auto& ref :
         from_payload<std::vector<tensor_ref>>(other, "rows of a gradient"))
      parts.push_back(to_tensor(ref));
  if (parts.empty())
    return {};
  return parameter.dim() == 0 ? parts.front() : at::cat(parts);
}

uint64_t gradient_shards::under_way() const {
  uint64_t result = 0;
  for (auto& x : under_way_)
    for (auto& p : x.pieces)
      result += !p.done.done();
  return result;
}

uint64_t gradient_shards::bytes_under_way() const {
  uint64_t result = 0;
  for (auto& x : under_way_)
    result += x.memory.nbytes();
  return result;
}

uint64_t gradient_shards::bytes() const {
  auto result = bytes_under_way();
  for (auto& x : shares_)
    for (auto& t :
         {x.sum, x.begin < x.end ? x.owners.rows.grad() : at::Tensor{}})
      if (t.defined() && !t.is_sparse())
        result += t.nbytes();
  return result;
}

} // namespace smp
