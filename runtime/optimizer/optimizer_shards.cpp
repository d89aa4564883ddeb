#include "runtime/optimizer/optimizer_shards.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/lazy/late_value.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/optimizer/gradient_rows.hpp"
#include "transport/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <set>
#include <utility>

namespace smp {

namespace {

/// Updated rows are sent together up to this size, as gradients are; large ones
/// alone, from memory to memory without a copy.
constexpr uint64_t updates_at_once = 25 << 20;
constexpr uint64_t travels_alone = 256 << 10;

/// A scalar is one row.
int64_t rows_in(const at::Tensor& x) {
  return x.dim() == 0 ? 1 : x.size(0);
}

/// Adagrad's constructor allocates its sums: cuts them.
void cut_sums(torch::optim::OptimizerParamState& x, int64_t begin,
              int64_t length) {
  auto* sums = dynamic_cast<torch::optim::AdagradParamState*>(&x);
  if (sums != nullptr && sums->sum().defined())
    sums->sum(rows_of(sums->sum(), begin, begin + length).clone());
}

/// @returns the state of a parameter, removed from `x`; null: none
std::unique_ptr<torch::optim::OptimizerParamState>
take_state(torch::optim::Optimizer& x, const at::Tensor& parameter) {
  auto found = x.state().find(parameter.unsafeGetTensorImpl());
  if (found == x.state().end())
    return nullptr;
  auto result = std::move(found->second);
  x.state().erase(found);
  return result;
}

} // namespace

/// Rows that one rank updated, in flight to the others.
struct optimizer_shards::transfer {
  /// The destinations of the rows that are received together.
  std::vector<at::Tensor> rows;
  tensor_future done;

  /// Returns when they have arrived.
  void arrive() {
    auto flat = done.get();
    int64_t begin = 0;
    for (auto& x : std::exchange(rows, {})) {
      x.copy_(flat.narrow(0, begin, x.numel()).view(x.sizes()));
      begin += x.numel();
    }
  }
};

row_begins cut_rows(const std::vector<row_block>& blocks, uint64_t ranks) {
  auto size_of = [](const row_block& x) {
    return static_cast<double>(x.rows) * static_cast<double>(x.row_bytes);
  };
  auto all = 0.0;
  for (auto& x : blocks)
    all += size_of(x);
  row_begins result;
  auto before = 0.0;
  for (auto& x : blocks) {
    auto size = size_of(x);
    auto& begins = result.emplace_back();
    for (uint64_t rank = 0; rank <= ranks; ++rank) {
      // Where the share of `rank` begins, in rows of this block.
      auto share = all * static_cast<double>(rank) / static_cast<double>(ranks);
      auto at = size > 0 ? (share - before) / size : 0.0;
      auto row = std::round(at * static_cast<double>(x.rows));
      begins.push_back(
        std::clamp<int64_t>(static_cast<int64_t>(row), 0, x.rows));
    }
    begins.front() = 0;
    begins.back() = x.rows;
    before += size;
  }
  return result;
}

void optimizer_shards::cut(torch::optim::Optimizer& x, const model_map& map) {
  if (rank_.layout().size(comm_group::dp) == 1)
    return;
  if (dynamic_cast<torch::optim::LBFGS*>(&x) != nullptr)
    throw config_error(
      "smp.shard_optimizer_state: LBFGS looks at all "
      "parameters together, so no rank can do a part of it");
  list_parameters(x, map);
  for (auto& over : {comm_group::dp, comm_group::rdp})
    cut_among(over);
  auto next = cuts_.begin();
  for (auto& group : x.param_groups()) {
    std::vector<at::Tensor> mine;
    for (auto& p : group.params()) {
      auto& c = *next++;
      auto me = rank_.layout().rank(c.over, rank_.self());
      auto begin = c.begins[me];
      auto length = c.begins[me + 1] - begin;
      auto state = take_state(x, p);
      if (length == 0)
        continue;
      auto rows = rows_of(p, begin, begin + length).set_requires_grad(true);
      if (state) {
        cut_sums(*state, begin, length);
        x.state()[rows.unsafeGetTensorImpl()] = std::move(state);
      }
      parts_.push_back({p, rows, {0, begin, length, p.sizes().vec()}});
      mine.push_back(std::move(rows));
    }
    group.params() = std::move(mine);
  }
}

void optimizer_shards::list_parameters(torch::optim::Optimizer& x,
                                       const model_map& map) {
  std::set<const void*> slices;
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (map.slice(i) != nullptr)
      slices.insert(tensors[i].tensor.unsafeGetTensorImpl());
  for (auto& group : x.param_groups())
    for (auto& p : group.params()) {
      auto is_slice = slices.contains(p.unsafeGetTensorImpl());
      auto i = map.model().find(p);
      cuts_.push_back({p,
                       i < 0 ? "" : map.tensor_name(static_cast<uint32_t>(i)),
                       is_slice ? comm_group::rdp : comm_group::dp,
                       {}});
    }
}

void optimizer_shards::cut_among(const comm_group& over) {
  std::vector<row_block> blocks;
  for (auto& c : cuts_)
    if (c.over == over) {
      auto rows = rows_in(c.parameter);
      blocks.push_back(
        {rows, c.parameter.nbytes()
                 / static_cast<uint64_t>(std::max<int64_t>(rows, 1))});
    }
  auto begins = cut_rows(blocks, rank_.layout().size(over));
  auto next = begins.begin();
  for (auto& c : cuts_)
    if (c.over == over)
      c.begins = std::move(*next++);
}

void optimizer_shards::begin_update() {
  if (rank_.config().shard_gradients)
    return; // already there
  for (auto& x : parts_) {
    auto& gradient = x.parameter.grad();
    auto& mine = x.rows.mutable_grad();
    if (gradient.defined())
      mine = rows_of_gradient(gradient, x.where.begin,
                              x.where.begin + x.where.length);
    else
      mine.reset();
  }
}

void optimizer_shards::drop_parts() {
  // With shards the rows' gradient is the only copy, so it stays.
  for (auto& x : parts_)
    if (!rank_.config().shard_gradients)
      x.rows.mutable_grad().reset();
}

void optimizer_shards::end_update() {
  at::NoGradGuard no_grad;
  drop_parts();
  await_updates();
  std::set<std::pair<group_kind, at::ScalarType>> kinds;
  for (auto& x : cuts_)
    kinds.emplace(x.over.kind(), x.parameter.scalar_type());
  for (auto& [kind, type] : kinds)
    exchange(kind, type);
  for (auto& c : cuts_) {
    if (c.missing.empty())
      continue;
    // Arrivals bypass the version counter, by which changes are detected.
    c.parameter.unsafeGetTensorImpl()->bump_version();
    make_late(
      c.parameter, [missing = std::exchange(c.missing, {}), name = c.name] {
        at::NoGradGuard no_grad_there;
        try {
          for (auto& x : missing)
            x->arrive();
        } catch (const error& e) {
          auto cause = e.cause();
          cause.text += ", which has new values of parameter '" + name + "'";
          throw error{std::move(cause)};
        }
      });
  }
  if (!rank_.config().overlapping_allreduce)
    await_updates();
}

void optimizer_shards::await_updates() {
  for (auto& c : cuts_)
    await_late(c.parameter);
  for (auto& x : std::exchange(under_way_, {}))
    x->arrive(); // this rank's own transfers
}

optimizer_shards::~optimizer_shards() {
  try {
    if (std::uncaught_exceptions() == 0)
      await_updates();
  } catch (const std::exception&) {
    // Code that needs them gets the error.
  }
  for (auto& c : cuts_)
    forget_late(c.parameter);
}

void optimizer_shards::send(std::vector<cut_parameter*>& xs,
                            const comm_group& over, uint64_t root) {
  if (xs.empty())
    return;
  auto mine = rank_.layout().rank(over, rank_.self()) == root;
  auto x = std::make_shared<transfer>();
  std::vector<at::Tensor> rows;
  for (auto* c : xs)
    rows.push_back(rows_of(c->parameter, c->begins[root], c->begins[root + 1]));
  auto alone = rows.size() == 1 && rows.front().is_contiguous();
  at::Tensor flat;
  if (mine) {
    // A copy: the parameter may change before all others have received it.
    for (auto& y : rows)
      y = y.reshape(-1);
    flat = at::cat(rows);
  } else if (alone) {
    flat = rows.front().variable_data().view(-1);
  } else {
    int64_t elements = 0;
    for (auto& y : rows) {
      elements += y.numel();
      x->rows.push_back(y.variable_data());
    }
    flat = at::empty({elements}, rows.front().options());
  }
  x->done = async::broadcast_(flat, over, root, "smp.updates");
  // Only after it has begun: a caller that waits for a rejected transfer would
  // wait forever.
  under_way_.push_back(x);
  if (!mine)
    for (auto* c : xs)
      c->missing.push_back(x);
  xs.clear();
}

void optimizer_shards::exchange(const comm_group& over, at::ScalarType type) {
  auto ranks = rank_.layout().size(over);
  if (ranks == 1)
    return;
  for (uint64_t root = 0; root < ranks; ++root) {
    std::vector<cut_parameter*> next;
    uint64_t bytes = 0;
    for (auto& c : cuts_) {
      // Parameters distributed over fewer ranks have fewer shares.
      if (c.over != over || c.parameter.scalar_type() != type)
        continue;
      auto rows = static_cast<uint64_t>(c.begins[root + 1] - c.begins[root]);
      if (rows == 0)
        continue;
      auto size = rows * c.parameter.nbytes()
                  / static_cast<uint64_t>(rows_in(c.parameter));
      if (size >= travels_alone) {
        std::vector<cut_parameter*> one{&c};
        send(one, over, root);
        continue;
      }
      if (bytes + size > updates_at_once) {
        send(next, over, root);
        bytes = 0;
      }
      next.push_back(&c);
      bytes += size;
    }
    send(next, over, root);
  }
}

void optimizer_shards::zero_grad() {
  for (auto& x : cuts_)
    x.parameter.mutable_grad().reset();
}

const optimizer_shards::part*
optimizer_shards::find(const at::Tensor& x) const {
  auto i = std::ranges::find_if(parts_, [&](const part& y) {
    return y.parameter.is_same(x) || y.rows.is_same(x);
  });
  return i == parts_.end() ? nullptr : &*i;
}

std::vector<optimizer_shards::owners> optimizer_shards::all_owners() const {
  std::vector<owners> result;
  for (auto& c : cuts_) {
    auto* mine = find(c.parameter);
    result.push_back({c.parameter, c.over, c.begins,
                      mine != nullptr ? mine->rows : at::Tensor{}});
  }
  return result;
}

} // namespace smp
