#include "actors/comm/comm_fabric.hpp"

#include "actors/comm/stage_actors.hpp"
#include "actors/protocol/actor_system.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

namespace smp {

namespace {

bool is_on_host(const tensor_ref& x) noexcept {
  return x.device == device_ref{} && !x.ready;
}

/// Whether a tensor rides in the first message, from host memory to host
/// memory, so that no stage has anything to do for it.
bool just_rides(const tensor_ref& x) noexcept {
  return x.nbytes <= riding_limit && is_on_host(x) && x.home == device_ref{};
}

template <class Predicate>
bool all_tensors(const message& x, Predicate f) {
  return std::all_of(x.body.tensors.begin(), x.body.tensors.end(), f);
}

} // namespace

struct comm_fabric::impl : comm_outside, tensor_places {
  impl(comm_fabric& owner, std::shared_ptr<actor_host> h,
       const comm_options& options)
    : owner(owner),
      host(std::move(h)),
      placing(dynamic_cast<placing_fabric*>(&owner.inner())),
      core(owner.self(), options, *this) {
    if (core.has_device_path())
      prepare_device_path();
    actors = spawn_stages(host->get().system, core);
  }

  void prepare_device_path() {
    if (placing == nullptr)
      throw error{error_code::unsupported,
                  "the device path without devices: this fabric "
                  "does not ask where tensors shall lie"};
    for (auto x : {&core.send_arena(), &core.receive_arena()})
      if (auto size = (*x)->status().capacity; size > 0)
        placing->register_memory((*x)->memory(), size);
    placing->place_with(*this);
  }

  /// After this, the stages make no more calls.
  void end_actors() {
    if (std::exchange(ended, true))
      return;
    caf::scoped_actor self{host->get().system};
    for (auto& x : actors) {
      self->monitor(x);
      self->send_exit(x, caf::exit_reason::user_shutdown);
    }
    for (size_t i = 0; i < actors.size(); ++i)
      self->receive([](const caf::down_msg&) {});
  }

  // -- comm_outside -----------------------------------------------------------

  void hand_over(comm_stage to, comm_message_ptr x) override {
    caf::anon_send(actors[static_cast<size_t>(to)], std::move(x));
  }

  void launch(const comm_message_ptr& x,
              std::vector<uint64_t> transfers) override {
    // From here on the fabric owns the content, so everything that is needed
    // later is stored beside it.
    auto left = [this, x](const failure& why) { core.left(x, why); };
    if (transfers.empty())
      owner.inner().send(x->peer, std::move(x->content), std::move(left));
    else
      placing->send_marked(x->peer, std::move(x->content), std::move(transfers),
                           std::move(left));
  }

  void deliver(rank_id from, message x) override {
    if (!core.delivers_in_turns())
      return owner.hear(from, std::move(x));
    // Several stages and the fabric deliver: let in one at a time, and nothing
    // from a rank after its loss.
    std::lock_guard guard{delivery};
    if (!lost.contains(from))
      owner.hear(from, std::move(x));
  }

  // -- tensor_places ----------------------------------------------------------

  std::shared_ptr<std::byte> place(const arriving_tensor& x) override {
    return core.place(x);
  }

  void placed(rank_id by, uint64_t transfer, bool as_marked) override {
    core.placed({by, transfer, as_marked});
  }

  comm_fabric& owner;
  std::shared_ptr<actor_host> host;
  placing_fabric* placing;
  comm_core core;
  std::array<comm_stage_actor, comm_stages> actors;
  std::mutex delivery;
  std::set<rank_id> lost; // guarded by delivery
  bool ended = false;
};

comm_fabric::comm_fabric(std::shared_ptr<fabric> inner,
                         std::shared_ptr<actor_host> host,
                         std::shared_ptr<rank_board> board,
                         const comm_options& options)
  : forwarding_fabric(std::move(inner)),
    board_(std::move(board)),
    impl_(std::make_unique<impl>(*this, std::move(host), options)) {
  // nop
}

comm_fabric::~comm_fabric() {
  // Otherwise the fabric below might still call objects that end here.
  stop(std::chrono::milliseconds{0});
}

void comm_fabric::place(std::vector<uint64_t> machine_of_rank) {
  impl_->core.place(std::move(machine_of_rank));
}

void comm_fabric::send(rank_id to, message x, sent_callback done) {
  board_->sent(to);
  // No stage has anything to do: all tensors ride, or stay in host memory.
  if (all_tensors(x, just_rides)
      || (to == self() && all_tensors(x, is_on_host)))
    return inner().send(to, std::move(x), std::move(done));
  impl_->core.send(to, std::move(x), std::move(done));
}

void comm_fabric::stop(std::chrono::milliseconds limit) {
  using clock = comm_ledger::clock;
  auto deadline = clock::now() + limit;
  impl_->core.drain(deadline);
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline
                                                           - clock::now());
  inner().stop(std::max(left, std::chrono::milliseconds{0}));
  impl_->core.close(
    {error_code::cancelled, self(), {}, "the fabric was stopped"});
  impl_->end_actors();
}

uint64_t comm_fabric::queued_to(rank_id x) const {
  auto credits = dynamic_cast<const credit_fabric*>(&inner());
  return impl_->core.queued_to(x)
         + (credits != nullptr ? credits->queued_to(x) : 0);
}

comm_report comm_fabric::status() const {
  return impl_->core.status();
}

void comm_fabric::on_message(rank_id from, message x) {
  if (all_tensors(x, just_rides))
    impl_->deliver(from, std::move(x));
  else
    impl_->core.arrived(from, std::move(x));
}

void comm_fabric::on_peer_lost(const failure& x) {
  impl_->core.peer_lost(x.rank);
  std::lock_guard guard{impl_->delivery};
  impl_->lost.insert(x.rank);
  listener().on_peer_lost(x);
}

} // namespace smp
