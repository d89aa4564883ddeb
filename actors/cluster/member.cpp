#include "actors/cluster/member.hpp"

#include <caf/send.hpp>

#include <utility>

namespace smp {

void member_state::join() {
  auto& joined = config.joined;
  // The SUPERVISOR knows who is missing, so its answer gets some more time.
  auto limit = config.join_limit + std::chrono::seconds(2);
  self->request(config.supervisor, limit, config.me, member_actor{self})
    .then(
      [joined](welcome& x) {
        if (x.error)
          joined->fail(std::move(x.error));
        else
          joined->set_value(std::move(x));
      },
      [joined, address = config.address](const caf::error& e) {
        joined->fail({error_code::rank_down,
                      no_rank,
                      {},
                      "the SUPERVISOR at " + address
                        + " did not answer: " + to_string(e)});
      });
}

void member_state::on_rank_down(const failure& x) {
  if (leaving)
    return;
  losses.push_back(x);
  config.on_rank_down(x);
}

void member_state::on_supervisor_down() {
  auto err = failure{error_code::rank_down,
                     no_rank,
                     {},
                     "the SUPERVISOR at " + config.address
                       + " is lost: its process ended or the connection broke"};
  if (!config.joined->done())
    config.joined->fail(std::move(err));
  else
    on_rank_down(err);
}

member_actor::behavior_type member_ear(member_state::pointer self,
                                       member_config config) {
  auto& st = self->state;
  st.config = std::move(config);
  self->set_down_handler(
    [self](const caf::down_msg&) { self->state.on_supervisor_down(); });
  self->set_error_handler([](const caf::error&) {});
  self->monitor(st.config.supervisor);
  st.join();
  return {
    [self](down_atom, const failure& x) { self->state.on_rank_down(x); },
    [self](goodbye_atom) { self->state.leaving = true; },
    [self](status_atom) {
      auto& st = self->state;
      return member_status{st.config.me.rank, st.losses};
    },
  };
}

} // namespace smp
