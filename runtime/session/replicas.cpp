#include "runtime/session/replicas.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/model/model_map.hpp"
#include "runtime/session/tensor_collectives.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"
#include "transport/exchange.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <map>

namespace smp {

/// What a rank tells those that hold the same modules.
struct replica_outcome {
  failure error;
  /// Positions of parameters whose gradient changed, ascending; and of them
  /// those whose gradient is sparse.
  std::vector<uint32_t> changed;
  std::vector<uint32_t> sparse;
};

template <class Inspector>
bool inspect(Inspector& f, replica_outcome& x) {
  return f.object(x).fields(f.field("error", x.error),
                            f.field("changed", x.changed),
                            f.field("sparse", x.sparse));
}

namespace {

/// Gradients go together up to this size (torch's DDP has the same).
constexpr uint64_t bucket_bytes = 25 << 20;

std::vector<uint32_t> merged(const std::vector<uint32_t>& a,
                             const std::vector<uint32_t>& b) {
  std::vector<uint32_t> result;
  std::set_union(a.begin(), a.end(), b.begin(), b.end(),
                 std::back_inserter(result));
  return result;
}

/// Gradients that are averaged in one go.
struct bucket {
  std::vector<at::Tensor> parameters;
  uint64_t bytes = 0;
  at::Tensor flat;
  tensor_future done;

  void start(const comm_group& over) {
    std::vector<at::Tensor> parts;
    for (auto& x : parameters)
      parts.push_back(x.grad().defined() ? x.grad().reshape(-1)
                                         : at::zeros_like(x).reshape(-1));
    flat = at::cat(parts);
    auto op = SMP_FAULT("summed-replicas") ? reduce_op::sum : reduce_op::mean;
    done = async::allreduce_(flat, over, op, "smp.gradients");
  }

  void finish() {
    done.get();
    int64_t begin = 0;
    for (auto& x : parameters) {
      auto part = flat.narrow(0, begin, x.numel()).view(x.sizes());
      begin += x.numel();
      if (x.grad().defined())
        x.mutable_grad().copy_(part);
      else
        x.mutable_grad() = part.clone();
    }
    flat = at::Tensor{};
  }
};

} // namespace

bool replicas::ends_session(const failure& x) {
  return x.code == error_code::rank_down || x.code == error_code::stalled;
}

std::vector<rank_id> replicas::group() const {
  return rank_.layout().members(comm_group::dp, rank_.self());
}

replicas::mark replicas::mark_of(const at::Tensor& parameter) {
  auto& x = parameter.grad();
  if (!x.defined())
    return {};
  return {x.unsafeGetTensorImpl(),
          static_cast<uint64_t>(x.is_inference() ? 0 : x._version())};
}

bool replicas::trains(const model_map& map, uint32_t tensor) {
  auto& x = map.model().tensors[tensor];
  return !x.is_buffer && map.owned(tensor) && x.tensor.defined()
         && x.tensor.requires_grad();
}

void replicas::begin_step(const model_map& map) {
  if (group().size() == 1)
    return;
  auto& tensors = map.model().tensors;
  marks_.assign(tensors.size(), {});
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (trains(map, i))
      marks_[i] = mark_of(tensors[i].tensor);
}

std::vector<uint32_t> replicas::changed(const model_map& map) const {
  std::vector<uint32_t> result;
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < marks_.size(); ++i)
    if (trains(map, i) && mark_of(tensors[i].tensor) != marks_[i])
      result.push_back(i);
  return result;
}

failure replicas::end_step(const model_map* map, const failure& mine) {
  auto ranks = group();
  if (ranks.size() == 1 || ends_session(mine))
    return mine;
  replica_outcome outcome{mine, {}, {}};
  if (map && !mine) {
    outcome.changed = changed(*map);
    for (auto i : outcome.changed)
      if (map->model().tensors[i].tensor.grad().is_sparse())
        outcome.sparse.push_back(i);
  }
  std::vector<uint32_t> all_changed;
  std::vector<uint32_t> sparse;
  auto all = rank_.exchange().all_gather(ranks, "smp.replicas",
                                         to_payload(outcome));
  for (size_t i = 0; i < all.size(); ++i) {
    auto x = from_payload<replica_outcome>(all[i], "end of a step");
    if (x.error && !mine) {
      if (x.error.rank == no_rank)
        x.error.rank = ranks[i];
      return x.error;
    }
    all_changed = merged(all_changed, x.changed);
    sparse = merged(sparse, x.sparse);
  }
  if (mine || SMP_FAULT("lone-replica"))
    return mine;
  at::NoGradGuard no_grad;
  // Of what tensor-parallel ranks share, each has the sum over the samples of
  // all of them.
  std::vector<at::Tensor> whole;
  std::vector<at::Tensor> slices;
  auto& tensors = map->model().tensors;
  for (auto i : all_changed)
    if (!std::binary_search(sparse.begin(), sparse.end(), i))
      (map->slice(i) ? slices : whole).push_back(tensors[i].tensor);
  average(whole, comm_group::dp);
  average(slices, comm_group::rdp);
  for (auto i : sparse)
    average_sparse(tensors[i].tensor,
                   map->slice(i) ? comm_group::rdp : comm_group::dp);
  auto peers = static_cast<double>(rank_.layout().size(comm_group::tp));
  for (auto i : all_changed)
    if (auto& x = tensors[i].tensor; map->slice(i) && x.grad().defined())
      x.mutable_grad().div_(peers);
  return {};
}

void replicas::average(const std::vector<at::Tensor>& parameters,
                       const comm_group& over) const {
  if (rank_.layout().size(over) == 1)
    return;
  std::map<at::ScalarType, std::vector<bucket>> by_type;
  for (auto& x : parameters) {
    auto& buckets = by_type[x.scalar_type()];
    if (buckets.empty() || buckets.back().bytes + x.nbytes() > bucket_bytes)
      buckets.emplace_back();
    buckets.back().parameters.push_back(x);
    buckets.back().bytes += x.nbytes();
  }
  // One is filled or emptied while the one before travels.
  bucket* under_way = nullptr;
  for (auto& [type, buckets] : by_type)
    for (auto& x : buckets) {
      x.start(over);
      if (under_way)
        under_way->finish();
      under_way = &x;
    }
  if (under_way)
    under_way->finish();
}

void replicas::average_sparse(const at::Tensor& parameter,
                              const comm_group& over) const {
  auto ranks = rank_.layout().members(over, rank_.self());
  if (ranks.size() == 1)
    return;
  using part = std::vector<tensor_ref>; // indices and values, or nothing
  auto& gradient = parameter.mutable_grad();
  part mine;
  if (gradient.defined()) {
    auto x = gradient.is_sparse() ? gradient.coalesce()
                                  : gradient.to_sparse(1).coalesce();
    mine = {to_tensor_ref(x.indices(), true), to_tensor_ref(x.values(), true)};
  }
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  for (auto& x : rank_.exchange().all_gather(ranks, "smp.sparse_gradient",
                                             to_payload(mine))) {
    auto other = from_payload<part>(x, "sparse gradient");
    if (other.size() != 2)
      continue;
    indices.push_back(to_tensor(other[0]));
    values.push_back(to_tensor(other[1]));
  }
  auto sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values),
                                   parameter.sizes())
               .coalesce();
  gradient = sum.div(static_cast<double>(ranks.size()));
}

} // namespace smp
