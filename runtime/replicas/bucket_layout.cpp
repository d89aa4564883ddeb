// Decides which gradients share a bucket, and when buckets begin.

#include "runtime/base/fnv_hash.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <algorithm>
#include <utility>

namespace smp {

gradient_buckets::entry* gradient_buckets::find(uint32_t position) {
  auto i = std::ranges::lower_bound(entries_, position, {},
                                    [](auto& x) { return x->position; });
  return i == entries_.end() || (*i)->position != position ? nullptr : i->get();
}

auto gradient_buckets::all_of(const std::vector<uint32_t>& positions)
  -> std::vector<entry*> {
  std::vector<entry*> result;
  for (auto i : positions)
    if (auto* x = find(i))
      result.push_back(x);
  return result;
}

void gradient_buckets::share(const std::vector<optimizer_shards::owners>& xs) {
  shards_.add(xs);
  lay_out(std::vector{order_});
  // Otherwise whole gradients would accumulate until the first step's report.
  auto mine = layout_hash();
  agreed_ = true;
  for (auto& x : rank_.exchange().all_gather(
         rank_.layout().members(comm_group::dp, rank_.self()),
         "smp.bucket_layout", to_payload(mine)))
    agreed_ = agreed_ && from_payload<uint64_t>(x, "layout of buckets") == mine;
  ordered_ = ordered_ && agreed_;
}

void gradient_buckets::lay_out(const std::vector<entry*>& order) {
  order_ = order;
  buckets_.clear();
  for (auto& x : entries_) {
    x->bucket = nowhere;
    x->view.reset();
  }
  for (auto* x : order)
    put(*x);
}

void gradient_buckets::put(entry& x) {
  if (rank_.layout().size(x.over) == 1)
    return; // no other rank has it
  auto most = rank_.config().bucket_cap_mb << 20;
  auto shared = shards_.has(x.parameter);
  auto fits = [&](const bucket& b) {
    return b.over == x.over && b.shared == shared
           && b.entries.front()->parameter.options().type_equal(
             x.parameter.options());
  };
  // The last bucket of its kind may have room.
  auto last = std::find_if(buckets_.rbegin(), buckets_.rend(), fits);
  if (last == buckets_.rend() || last->bytes + x.bytes > most) {
    auto& next = buckets_.emplace_back();
    next.over = x.over;
    next.shared = shared;
    last = buckets_.rbegin();
  }
  last->entries.push_back(&x);
  last->bytes += x.bytes;
  x.bucket = static_cast<uint32_t>(&*last - buckets_.data());
}

uint64_t gradient_buckets::layout_hash() const {
  fnv_hash result;
  for (auto& b : buckets_) {
    result.add(b.entries.size());
    for (auto* x : b.entries)
      result.add(uint64_t{x->position});
  }
  return result.get() | 1; // 0 has another meaning
}

/// How often a parameter is reached before its bucket begins; 0: unknown.
/// @param known how often a step of this kind reached each; null: no such step
/// yet
uint64_t gradient_buckets::expected_of(const entry& x,
                                       const std::vector<uint64_t>* known,
                                       size_t index) const {
  auto shared = x.bucket != nowhere && buckets_[x.bucket].shared;
  if (!shared)
    return known != nullptr ? known->at(index) : 0;
  // Sharded gradients have room for one microbatch. A bucket may begin any
  // number of times, so a wrong guess costs no more than another round.
  auto microbatches = std::max<uint64_t>(plan_.microbatches, 1);
  return known != nullptr ? (known->at(index) + microbatches - 1) / microbatches
                          : 1;
}

/// Records how often entries were reached, and puts gradients that become final
/// together into the same buckets.
void gradient_buckets::learn(const gradient_report& all,
                             const gradient_report& first, bool agreed,
                             const std::vector<entry*>& sparse) {
  if (all.changed.empty())
    return;
  auto& expected = expected_[plan_.kind];
  expected.resize(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i)
    expected[i] = std::max(expected[i], entries_[i]->reached);
  auto moves = [&](entry* x) {
    return x->bucket == nowhere
           && !std::ranges::binary_search(all.sparse, x->position)
           && rank_.layout().size(x->over) > 1;
  };
  auto changed = all_of(all.changed);
  auto in_bucket = [](entry* x) { return x->bucket != nowhere; };
  if (ordered_ && std::ranges::none_of(changed, moves)
      && std::ranges::none_of(sparse, in_bucket))
    return;
  std::vector<entry*> order;
  auto add = [&](entry* x) {
    if (!std::ranges::binary_search(all.sparse, x->position)
        && std::ranges::find(order, x) == order.end())
      order.push_back(x);
  };
  for (auto* x : all_of(first.order))
    add(x);
  // If buckets differ, it is unknown what the other ranks have in theirs.
  for (size_t i = 0; i < buckets_.size() && agreed; ++i)
    for (auto* x : buckets_[i].entries)
      add(x);
  for (auto* x : changed)
    add(x);
  lay_out(order);
  agreed_ = ordered_ = true;
}

} // namespace smp
