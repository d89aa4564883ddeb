#include "runtime/session/tensor_peers.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/base/rank_context.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/remote/execution.hpp"
#include "runtime/session/tensor_collectives.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

namespace smp {

namespace {

constexpr auto& peers = comm_group::tp;

/// What is computed again is exchanged again, in backward, where its own
/// backward has the names of the first time (R52).
std::string name_in_pass(const std::string& x) {
  auto* ex = execution::current();
  return ex && ex->pass().what == recompute_pass::kind::again ? x + " again"
                                                              : x;
}

} // namespace

uint64_t tensor_peers::size() const {
  return rank_.layout().size(peers);
}

uint64_t tensor_peers::rank() const {
  return rank_.layout().rank(peers, rank_.self());
}

std::string tensor_peers::next_name() {
  auto* ex = execution::current();
  if (!ex)
    throw error{error_code::unsupported,
                "a module that tensor-parallel ranks share was called outside "
                "of a step: its peers are not there"};
  auto [path, number] = ex->streams().next_collective();
  return fmt::format("{}/{:x}.{}", ex->module_path(), path, number);
}

void tensor_peers::draw_as(uint64_t peer, const std::vector<std::string>& calls,
                           const std::function<void()>& f) {
  auto* ex = execution::current();
  if (!ex)
    throw error{error_code::unsupported,
                "dropout in a module that tensor-parallel ranks share, outside "
                "of a step"};
  auto& layout = rank_.layout();
  auto theirs = layout.rank(comm_group::dp,
                            layout.members(peers, rank_.self()).at(peer));
  auto seed = microbatch_seed(rank_.config().seed, rank_.drawn_step(), theirs,
                              ex->microbatch().value);
  auto path = ex->streams().here().path;
  for (auto& x : calls)
    path = path_of_call(path, path_of_module(x), 0);
  ex->streams().draw_as(seed, path, f);
}

at::Tensor tensor_peers::allreduce(const at::Tensor& x,
                                   const std::string& name) {
  return smp::allreduce(x, peers, reduce_op::sum, name_in_pass(name));
}

at::Tensor tensor_peers::allgather(const at::Tensor& x,
                                   const std::string& name) {
  return smp::allgather(x, peers, name_in_pass(name));
}

at::Tensor tensor_peers::reduce_scatter(const at::Tensor& x,
                                        const std::string& name) {
  return smp::reduce_scatter(x, peers, reduce_op::sum, name_in_pass(name));
}

at::Tensor tensor_peers::all_to_all(const at::Tensor& x,
                                    const std::string& name) {
  return smp::all_to_all(x, peers, name_in_pass(name));
}

at::Tensor tensor_peers::exchange_rows(const at::Tensor& x,
                                       const std::vector<int64_t>& given,
                                       const std::vector<int64_t>& taken,
                                       const std::string& name) {
  return smp::all_to_all(x, {given.begin(), given.end()},
                         {taken.begin(), taken.end()}, peers,
                         name_in_pass(name));
}

} // namespace smp
