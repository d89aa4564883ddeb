#pragma once

// Several ranks of one pipeline under the test scheduler: scripted user code,
// a stepped network, one order of events per seed.

#include "tests/support/actors/actor_fixture.hpp"
#include "tests/support/actors/function_services.hpp"
#include "tests/support/actors/scripted_executor.hpp"

#include "actors/board/rank_board.hpp"
#include "actors/server/module_server.hpp"
#include "transport/loopback/loopback_fabric.hpp"

#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace smp {

class actor_world : public actor_fixture, public stage {
public:
  /// What a test knows of one rank.
  struct rank_entry : fabric_listener {
    void on_message(rank_id from, message x) override {
      caf::anon_send(server, from, std::move(x));
    }

    void on_peer_lost(const failure& x) override {
      caf::anon_send(server, down_atom_v, x);
    }

    function_services services;
    module_server_actor server;
    std::shared_ptr<order_book> records;
    std::optional<step_report> report;
    /// Microbatches over, in the order of their ends.
    std::vector<std::pair<step_id, microbatch_id>> over;
  };

  struct options {
    uint64_t world_size = 2;
    uint64_t seed = 1;
    bool reorder = false;
    bool share_token = false;
    std::string schedule = "interleaved";
    uint64_t active = 2;
    /// Instead of `schedule`.
    std::shared_ptr<const user_schedule> user = {};
    /// Default: steps are neither recorded nor replayed.
    order_book::options records = {};
  };

  ~actor_world() {
    // Ends contexts first, while the stage that they play on is there.
    for (auto& x : spawned)
      caf::anon_send_exit(x, caf::exit_reason::kill);
    sched.run();
    for (size_t i = 0; i < ranks.size(); ++i)
      net->at(rank_id{i}).stop(std::chrono::milliseconds{0});
  }

  void init(options x) {
    rng.seed(static_cast<uint32_t>(x.seed));
    shuffle = x.reorder;
    net = std::make_unique<loopback_network>(
      x.world_size, loopback_options{x.seed, x.reorder, true});
    std::vector<rank_id> pipeline;
    std::vector<std::string> addresses;
    for (uint64_t i = 0; i < x.world_size; ++i) {
      pipeline.push_back(rank_id{i});
      addresses.push_back(net->at(rank_id{i}).address());
    }
    auto shared = std::make_shared<execution_token>();
    for (uint64_t i = 0; i < x.world_size; ++i) {
      auto& entry = *ranks.emplace_back(std::make_unique<rank_entry>());
      server_options cfg;
      cfg.self = rank_id{i};
      cfg.pipeline = pipeline;
      cfg.fabric = &net->at(rank_id{i});
      cfg.services = &entry.services;
      cfg.token = x.share_token ? shared : std::make_shared<execution_token>();
      entry.services.executor = factory(rank_id{i});
      entry.records = std::make_shared<order_book>(x.records);
      cfg.records = entry.records;
      cfg.board = std::make_shared<rank_board>(rank_id{i}, 0);
      entry.services.name = [](module_id m) {
        return m == root_module ? "" : "m" + std::to_string(m.value);
      };
      cfg.board->name_modules(entry.services.name);
      entry.services.schedule = [x, this](uint64_t n) {
        ++schedules;
        return make_schedule(x.schedule, n, x.active);
      };
      cfg.schedule_actor = x.user;
      entry.services.over = [&entry](step_id s, microbatch_id mb) {
        entry.over.emplace_back(s, mb);
      };
      auto on_report = [&entry](step_report y) { entry.report = std::move(y); };
      entry.server = own(sys.spawn(module_server, std::move(cfg), on_report));
      net->at(rank_id{i}).start(addresses, entry);
    }
    sched.run();
  }

  module_server_actor& server(size_t rank) {
    return ranks[rank]->server;
  }

  void enter(size_t rank, uint64_t step, uint64_t microbatches) {
    ranks[rank]->report.reset();
    caf::anon_send(server(rank), run_step{step_id{step}, microbatches});
    sched.run();
  }

  void enter_all(uint64_t step, uint64_t microbatches) {
    for (size_t i = 0; i < ranks.size(); ++i)
      enter(i, step, microbatches);
  }

  /// Does one thing that can happen next. @returns false if nothing can
  bool happen() {
    sched.run();
    if (shuffle && rng() % 2 == 0)
      return net->deliver_one() || advance_one();
    return advance_one() || net->deliver_one();
  }

  void run() {
    while (happen())
      if (after_each)
        after_each();
  }

  /// Runs a step on all ranks. @returns the report of pp_rank 0, after a check
  /// that all ranks got the same
  step_report step(uint64_t number, uint64_t microbatches) {
    enter_all(number, microbatches);
    run();
    auto result = ranks[0]->report.value();
    for (auto& x : ranks) {
      auto& y = x->report.value();
      if (!(y.error == result.error) || texts(y) != texts(result))
        throw std::logic_error("ranks got different reports");
    }
    return result;
  }

  static std::vector<std::string> texts(const step_report& x) {
    std::vector<std::string> result;
    for (auto& y : x.values)
      result.push_back(text_of(y));
    return result;
  }

  server_status status(size_t rank) {
    return ask<server_status>(server(rank), status_atom_v);
  }

  std::vector<context_status> contexts(size_t rank) {
    std::vector<context_status> result;
    for (auto& x : status(rank).contexts)
      result.push_back(ask<context_status>(x, status_atom_v));
    return result;
  }

  bool shuffle = false;
  /// How many were made.
  uint64_t schedules = 0;
  std::minstd_rand rng;
  std::unique_ptr<loopback_network> net;
  std::vector<std::unique_ptr<rank_entry>> ranks;
  std::function<void()> after_each;
};

} // namespace smp
