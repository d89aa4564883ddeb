#include "actors/server/execution_token.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/session/stalls.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <exception>
#include <mutex>
#include <thread>

namespace smp {

namespace {

using rank_ptr = std::shared_ptr<rank_runtime>;

std::vector<rank_ptr>
make_ranks(const std::vector<std::shared_ptr<fabric>>& fabrics,
           const std::shared_ptr<actor_host>& host,
           const session_config& config) {
  // Generators and JIT switches are process-global: one token for all (R26).
  auto token = std::make_shared<execution_token>();
  std::vector<rank_ptr> result;
  for (auto& x : fabrics) {
    rank_runtime::parts parts;
    parts.config = config;
    parts.config.print_partition = false; // tests have their own output
    parts.layout.size = fabrics.size();
    parts.layout.pipeline = config.pipeline_parallel_degree;
    parts.layout.tensor = config.tensor_parallel_degree;
    parts.layout.ddp = config.ddp;
    parts.layout.placement = config.placement_strategy;
    parts.fabric = x;
    parts.host = host;
    parts.token = token;
    parts.device = choose_device(config.device, x->self().value);
    result.push_back(std::make_shared<rank_runtime>(std::move(parts)));
  }
  return result;
}

/// Runs `body` on each rank, each on its own thread.
/// @returns the first error, or null
std::exception_ptr run_on_threads(const std::vector<rank_ptr>& ranks,
                                  const session_config& config,
                                  const std::function<void(session&)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&] {
      try {
        session s{config, rank};
        body(s);
      } catch (...) {
        std::unique_lock guard{mutex};
        if (!first)
          first = std::current_exception();
        guard.unlock();
        // As when a process dies: the others must not wait for this rank.
        failure why{
          error_code::rank_down, rank->self(), {}, "its thread threw"};
        for (auto& other : ranks)
          if (other != rank)
            other->fabric().peer_lost(why);
      }
    });
  for (auto& t : threads)
    t.join();
  return first;
}

} // namespace

void run_virtual_world(uint64_t world_size, const virtual_world_options& x,
                       const std::function<void(session&)>& body) {
  auto host = std::make_shared<actor_host>();
  auto net = std::make_shared<loopback_network>(
    world_size,
    loopback_options{.seed = x.seed, .reorder = x.reorder, .stepped = false});
  std::vector<std::shared_ptr<fabric>> fabrics;
  for (uint64_t r = 0; r < world_size; ++r)
    fabrics.emplace_back(net, &net->at(rank_id{r}));
  run_virtual_world(fabrics, host, x.config, body);
}

void run_virtual_world(const std::vector<std::shared_ptr<fabric>>& fabrics,
                       const std::shared_ptr<actor_host>& host,
                       session_config config,
                       const std::function<void(session&)>& body) {
  load_schedule(config);
  auto ranks = make_ranks(fabrics, host, config);
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
  std::exception_ptr failed;
  {
    stall_search stalls{*host, stalls_of(config), std::move(watched)};
    ranks.front()->on_inspection(
      [&stalls] { return std::optional{stalls.open_inspection()}; });
    failed = run_on_threads(ranks, config, body);
  }
  for (auto& r : ranks)
    r->stop();
  if (failed)
    std::rethrow_exception(failed);
}

} // namespace smp
