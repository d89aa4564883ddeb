#include "runtime/collectives/tensor_peers.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/collectives/data_group.hpp"
#include "runtime/collectives/tensor_collectives.hpp"
#include "runtime/collectives/wait_for_peers.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/execution/running_call.hpp"
#include "transport/collectives/collectives.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace smp {

namespace {

constexpr auto& peers = comm_group::tp;

/// A recomputation repeats its exchanges, in backward, where its own backward
/// uses the names of the first pass (R52).
std::string name_in_pass(const std::string& x) {
  auto* ex = running_call::current();
  return ex && ex->pass().what == recompute_pass::kind::again ? x + " again"
                                                              : x;
}

tensor_group::pending pending_of(tensor_future x) {
  return [future = std::move(x)] {
    wait_for_peers waiting;
    return future.get();
  };
}

/// @returns the path of the call in a name made by `tensor_peers::next_name`;
/// empty: it is none
std::string call_of(const std::string& name) {
  auto slash = name.rfind('/');
  auto dot = name.rfind('.');
  return slash == name.npos || dot == name.npos || dot < slash
           ? std::string{}
           : name.substr(slash + 1, dot - slash - 1);
}

} // namespace

uint64_t tensor_peers::size() const {
  return rank_.layout().size(peers);
}

uint64_t tensor_peers::rank() const {
  return rank_.layout().rank(peers, rank_.self());
}

bool tensor_peers::same_samples() const {
  return rank_.config().prescaled_batch;
}

std::string tensor_peers::next_name() {
  auto* ex = running_call::current();
  if (!ex)
    throw error{error_code::unsupported,
                "a module that tensor-parallel ranks share was called outside "
                "of a step: its peers are not there"};
  auto [path, number] = ex->streams().next_collective();
  return fmt::format("{}/{:x}.{}", ex->module_path(), path, number);
}

entered_tensors* tensor_peers::entered() {
  auto* ex = running_call::current();
  return ex ? &ex->entered() : nullptr;
}

void tensor_peers::draw_as(uint64_t peer, const std::vector<std::string>& calls,
                           const std::function<void()>& f) {
  auto* ex = running_call::current();
  if (!ex)
    throw error{error_code::unsupported,
                "dropout in a module that tensor-parallel ranks share, outside "
                "of a step"};
  auto& layout = rank_.layout();
  auto theirs = layout.rank(data_group(rank_.config()),
                            layout.members(peers, rank_.self()).at(peer));
  auto seed = microbatch_seed(rank_.config().seed, rank_.drawn_step(), theirs,
                              ex->microbatch().value);
  auto path = ex->streams().here().path;
  for (auto& x : calls)
    path = path_of_call(path, path_of_module(x), 0);
  ex->streams().draw_as(seed, path, f);
}

tensor_group::pending tensor_peers::begin_allreduce(const at::Tensor& x,
                                                    const std::string& name) {
  return pending_of(
    async::allreduce(x, peers, reduce_op::sum, name_in_pass(name)));
}

tensor_group::pending tensor_peers::begin_allgather(const at::Tensor& x,
                                                    const std::string& name) {
  return pending_of(async::allgather(x, peers, name_in_pass(name)));
}

tensor_group::pending
tensor_peers::begin_reduce_scatter(const at::Tensor& x,
                                   const std::string& name) {
  return pending_of(
    async::reduce_scatter(x, peers, reduce_op::sum, name_in_pass(name)));
}

tensor_group::pending tensor_peers::begin_all_to_all(const at::Tensor& x,
                                                     const std::string& name) {
  return pending_of(async::all_to_all(x, peers, name_in_pass(name)));
}

at::Tensor tensor_peers::exchange_rows(const at::Tensor& x,
                                       const std::vector<int64_t>& given,
                                       const std::vector<int64_t>& taken,
                                       const std::string& name) {
  wait_for_peers waiting;
  return smp::all_to_all(x, {given.begin(), given.end()},
                         {taken.begin(), taken.end()}, peers,
                         name_in_pass(name));
}

// -- for who looks ------------------------------------------------------------

std::vector<shared_calls> tensor_peers::calls(step_id step) const {
  auto group = rank_.layout().members(peers, rank_.self());
  auto begun = rank_.collectives().begun(step);
  std::erase_if(begun, [&](auto& x) {
    return x.label.group != group || call_of(x.label.name).empty();
  });
  // Calls by autograd have the names that they had in forward.
  std::map<std::string, std::string> modules;
  for (auto& x : begun)
    if (x.label.what == phase::forward)
      modules.emplace(call_of(x.label.name), x.place);
  using place = std::tuple<microbatch_id, phase, std::string>;
  std::map<place, shared_calls> result;
  std::set<std::pair<place, std::string>> seen;
  for (auto& x : begun) {
    auto call = call_of(x.label.name);
    auto in_forward = modules.find(call);
    auto module = in_forward == modules.end() ? x.place : in_forward->second;
    place where{x.label.microbatch, x.label.what, module};
    auto& y = result[where];
    y.module = module;
    y.microbatch = x.label.microbatch;
    y.what = x.label.what;
    y.waits = y.waits || !x.absent.empty();
    if (x.runs)
      y.running.push_back(x.label.name);
    if (seen.emplace(where, call).second)
      ++y.calls;
  }
  std::vector<shared_calls> all;
  for (auto& [where, x] : result)
    all.push_back(std::move(x));
  return all;
}

} // namespace smp
