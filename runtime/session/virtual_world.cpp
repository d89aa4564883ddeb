#include "actors/server/execution_token.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/session/stalls.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <exception>
#include <mutex>
#include <thread>

namespace smp {

namespace {

/// Passes the network's and the token's life on to every rank.
std::shared_ptr<rank_runtime>
make_rank(const std::shared_ptr<loopback_network>& net, uint64_t rank,
          const virtual_world_options& x,
          const std::shared_ptr<actor_host>& host,
          const std::shared_ptr<execution_token>& t) {
  rank_runtime::parts parts;
  parts.config = x.config;
  parts.config.print_partition = false; // tests have an output of their own
  parts.layout.size = net->size();
  parts.layout.pipeline = x.config.pipeline_parallel_degree;
  parts.layout.placement = x.config.placement_strategy;
  parts.fabric = {net, &net->at(rank_id{rank})};
  parts.host = host;
  parts.token = t;
  return std::make_shared<rank_runtime>(std::move(parts));
}

} // namespace

void run_virtual_world(uint64_t world_size, const virtual_world_options& given,
                       const std::function<void(session&)>& body) {
  auto x = given;
  load_schedule(x.config);
  auto host = std::make_shared<actor_host>();
  // Generators and JIT switches are process-global: one token for all (R26).
  auto token = std::make_shared<execution_token>();
  auto net = std::make_shared<loopback_network>(
    world_size,
    loopback_options{.seed = x.seed, .reorder = x.reorder, .stepped = false});
  std::vector<std::shared_ptr<rank_runtime>> ranks;
  for (uint64_t r = 0; r < world_size; ++r)
    ranks.push_back(make_rank(net, r, x, host, token));
  std::vector<std::string> addresses;
  for (auto& r : ranks)
    addresses.push_back(r->fabric().address());
  std::vector<watched_rank> watched;
  for (auto& r : ranks) {
    r->start(addresses);
    watched.push_back(r->watch());
    if (r != ranks.front())
      r->keep_stalls_quiet(); // they share one stderr
  }
  auto stalls = std::make_unique<stall_watch>(*host, stalls_of(x.config),
                                              std::move(watched));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (uint64_t r = 0; r < world_size; ++r)
    threads.emplace_back([&, r] {
      try {
        session s{x.config, ranks[r]};
        body(s);
      } catch (...) {
        std::unique_lock guard{mutex};
        if (!first)
          first = std::current_exception();
        guard.unlock();
        // As when a process ends: the others must not wait for this rank.
        net->kill({error_code::rank_down, rank_id{r}, {}, "its thread threw"});
      }
    });
  for (auto& t : threads)
    t.join();
  stalls.reset();
  for (auto& r : ranks)
    r->stop();
  if (first)
    std::rethrow_exception(first);
}

} // namespace smp
