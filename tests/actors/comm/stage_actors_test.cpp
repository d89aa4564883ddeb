#include "tests/support/catch.hpp"

#include "actors/comm/stage_actors.hpp"
#include "actors/protocol/actor_system.hpp"
#include "tests/support/actors/payloads.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <array>
#include <chrono>
#include <future>
#include <utility>
#include <vector>

using namespace smp;
using namespace smp::test;

namespace {

constexpr uint64_t kb = 1024;

/// Hands messages over to the actors, and gives what they launch to the test.
struct acted : comm_outside {
  explicit acted(const comm_options& options)
    : core(rank_id{0}, options, *this),
      actors(spawn_stages(host.system, core)) {
    // nop
  }

  ~acted() override {
    caf::scoped_actor self{host.system};
    for (auto& x : actors) {
      self->monitor(x);
      self->send_exit(x, caf::exit_reason::user_shutdown);
    }
    for (size_t i = 0; i < actors.size(); ++i)
      self->receive([](const caf::down_msg&) {});
  }

  void hand_over(comm_stage to, comm_message_ptr x) override {
    caf::anon_send(actors[static_cast<size_t>(to)], std::move(x));
  }

  void launch(const comm_message_ptr& x, std::vector<uint64_t>) override {
    launched.set_value(x);
  }

  void deliver(rank_id, message) override {
    // nop
  }

  comm_stage_status ask(comm_stage x) {
    caf::scoped_actor self{host.system};
    comm_stage_status result;
    self
      ->request(actors[static_cast<size_t>(x)], std::chrono::seconds{30},
                status_atom_v)
      .receive([&](const comm_stage_status& y) { result = y; },
               [](const caf::error& e) { FAIL(to_string(e)); });
    return result;
  }

  actor_host::impl host;
  comm_core core;
  std::array<comm_stage_actor, comm_stages> actors;
  std::promise<comm_message_ptr> launched;
};

} // namespace

TEST_CASE("each stage is an actor that tells what it did and holds",
          "[actors][comm]") {
  comm_options options;
  options.force_device_path = true;
  options.send_arena = 256 * kb;
  options.receive_arena = 256 * kb;
  options.ranks_per_node = 1;
  acted x{options};
  x.core.send(rank_id{1}, make_message("x", {make_tensor(100 * kb, 1)}), {});
  auto m = x.launched.get_future().get();
  for (size_t i = 0; i < comm_stages; ++i) {
    auto stage = static_cast<comm_stage>(i);
    CAPTURE(to_string(stage));
    auto now = x.ask(stage);
    CHECK(now.stage == stage);
    auto works = stage == comm_stage::initiator
                 || stage == comm_stage::d2d_allocator
                 || stage == comm_stage::cross_node_progress
                 || stage == comm_stage::io_send_watcher;
    CHECK(now.handled == (works ? 1 : 0));
    CHECK(now.held == (stage == comm_stage::io_send_watcher ? 1 : 0));
  }
  x.core.left(m, {});
  CHECK(x.ask(comm_stage::io_send_watcher).held == 0);
  x.core.placed({rank_id{1}, m->tensors[0].id, true});
  CHECK(x.core.status().sent[0] == 1);
}
