#include "tests/support/catch.hpp"

#include "actors/comm/stage_actors.hpp"
#include "actors/protocol/actor_system.hpp"
#include "tests/support/actors/payloads.hpp"
#include "tests/support/actors/staged_rank.hpp"

#include <caf/scoped_actor.hpp>

#include <chrono>
#include <memory>
#include <utility>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t kb = 1024;

comm_stage_status ask(const comm_stage_actor& x, caf::actor_system& system) {
  caf::scoped_actor self{system};
  comm_stage_status result;
  self->request(x, std::chrono::seconds{30}, status_atom_v)
    .receive([&](const comm_stage_status& y) { result = y; },
             [](const caf::error& e) { FAIL(to_string(e)); });
  return result;
}

} // namespace

TEST_CASE("each stage is an actor that tells what it did and holds",
          "[actors][comm]") {
  comm_options options;
  options.force_device_path = true;
  options.send_arena = 256 * kb;
  options.receive_arena = 256 * kb;
  options.ranks_per_node = 1;
  staged_rank x{options};
  auto host = std::make_shared<actor_host>();
  stage_actors actors{host, x.stages};
  auto ask_stage = [&](comm_stage y) {
    return ask(actors.at(y), host->get().system);
  };
  x.send({make_tensor(100 * kb, 1)});
  REQUIRE(x.turns.size() == 1);
  actors.hand_over(x.turns[0].first, std::move(x.turns[0].second), {});
  // Answered once the message had its turn.
  ask_stage(x.turns[0].first);
  for (size_t i = 0; i < comm_stages; ++i) {
    auto stage = static_cast<comm_stage>(i);
    CAPTURE(to_string(stage));
    auto now = ask_stage(stage);
    CHECK(now.stage == stage);
    auto works = stage == comm_stage::initiator
                 || stage == comm_stage::d2d_allocator
                 || stage == comm_stage::cross_node_progress
                 || stage == comm_stage::io_send_watcher;
    CHECK(now.handled == (works ? 1 : 0));
    CHECK(now.held == (stage == comm_stage::io_send_watcher ? 1 : 0));
  }
  REQUIRE(x.below->held.size() == 1);
  auto name = x.below->held[0].transfers[0];
  x.below->leave();
  CHECK(ask_stage(comm_stage::io_send_watcher).held == 0);
  x.below->places->placed(rank_id{1}, name, true);
  CHECK(x.sent(comm_rule::device_path) == 1);
}
