// How a message gets from and to a device, for comm_fabric.hpp.

#include "actors/comm/comm_fabric.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace smp {

namespace {

/// For messages whose device has failed, while some wait for one.
constexpr std::chrono::milliseconds between_looks{1000};

const std::string which_has_failed
  = ", which has failed (smp.wait_for_device = true names the module)";

std::string device_name(device_ref x) {
  return x == device_ref{}
           ? "host memory"
           : "device " + std::to_string(x.type) + ":" + std::to_string(x.index);
}

} // namespace

failure comm_fabric::why_not_copied(const error& e, rank_id other) const {
  auto result = e.cause();
  auto mine = devices_->failed();
  if (result.rank == no_rank)
    result.rank = mine ? self() : other;
  if (mine)
    result.text += which_has_failed;
  return result;
}

void comm_fabric::turn(comm_stage to, comm_message_ptr x) {
  hand_over_(to, std::move(x), std::chrono::milliseconds{0});
}

void comm_fabric::bring(comm_message& x, size_t position,
                        std::shared_ptr<std::byte> to, device_ref where) {
  auto& t = x.content.body.tensors[position];
  replace(x, position, devices_->copy(t, std::move(to), where));
}

void comm_fabric::replace(comm_message& x, size_t position, tensor_ref copy) {
  auto& t = x.content.body.tensors[position];
  auto home = t.device == device_ref{} ? t.home : t.device;
  x.sources.push_back(std::exchange(t, std::move(copy)));
  t.home = home;
}

failure comm_fabric::bring_out(comm_message& x) try {
  auto& tensors = x.content.body.tensors;
  std::vector<std::shared_ptr<std::byte>> blocks(tensors.size());
  std::vector<device_ref> places(tensors.size());
  for (auto& t : x.tensors)
    if (t.device != device_ref{} && t.block) {
      blocks[t.position] = std::exchange(t.block, nullptr);
      if (t.lends)
        places[t.position] = arenas_.place();
    }
  // All of them before the first copy, which could not be taken back.
  std::map<size_t, tensor_ref> staged, made;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].device == device_ref{} || blocks[i])
      continue;
    if (auto known = host_copies_.find(tensors[i])) {
      staged.emplace(i, std::move(*known));
    } else {
      blocks[i] = devices_->allocate({}, tensors[i].nbytes);
      made.emplace(i, tensors[i]);
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i)
    if (auto known = staged.find(i); known != staged.end())
      replace(x, i, std::move(known->second));
    else if (blocks[i])
      bring(x, i, std::move(blocks[i]), places[i]);
  for (auto& [i, source] : made)
    host_copies_.add(source, tensors[i]);
  return {};
} catch (const error& e) {
  return why_not_copied(e, self());
} catch (const std::bad_alloc&) {
  return {error_code::transport, self(), {}, "no memory to copy a tensor"};
}

failure comm_fabric::bring_rest(comm_message& x) try {
  for (auto& t : x.tensors)
    if (t.block)
      bring(x, t.position, std::move(t.block), {});
  x.sources.clear();
  return {};
} catch (const error& e) {
  return why_not_copied(e, self());
}

failure comm_fabric::bring_in(comm_message& x) try {
  for (auto& t : x.content.body.tensors) {
    if (t.lent) {
      auto there = arenas_.find(x.peer, t);
      x.borrowed.push_back(there.number);
      ledger_.received(comm_rule::device_path);
      t = std::move(there.tensor);
      borrowed_bytes_ += t.nbytes;
    }
    if (auto copy = copy_of(t, x.peer))
      x.sources.push_back(std::exchange(t, std::move(*copy)));
  }
  return {};
} catch (const error& e) {
  auto why = e.cause();
  why.rank = x.peer;
  return why;
}

std::optional<tensor_ref> comm_fabric::copy_of(tensor_ref& x, rank_id sender) {
  auto where = x.home == device_ref{} ? std::nullopt : devices_->here(x.home);
  if (where) {
    auto result = copy_to(x, *where, sender);
    if (result) {
      result->home = {};
      return result;
    }
  }
  if (x.device != device_ref{}
      || (receive_arena_ && receive_arena_->contains(x.data)))
    return copy_to(x, {}, sender);
  return std::nullopt;
}

std::optional<tensor_ref> comm_fabric::copy_to(tensor_ref& x, device_ref where,
                                               rank_id sender) {
  auto on_host = x.device == device_ref{} && where == device_ref{};
  failure why{error_code::user_code, self(), {}, "it has no room"};
  try {
    return devices_->copy(
      x, on_host ? pool_.take(x.nbytes) : devices_->allocate(where, x.nbytes),
      where);
  } catch (const std::bad_alloc&) {
    // nop
  } catch (const error& e) {
    why = why_not_copied(e, sender);
  }
  if (where != device_ref{}) {
    why.text = "a received tensor of " + std::to_string(x.nbytes)
               + " bytes could not be copied to the device: " + why.text;
    x.unplaced = std::make_shared<failure>(std::move(why));
  }
  return std::nullopt;
}

void comm_fabric::take_back(rank_id by, const message& x) try {
  arenas_.take_back(by, x);
} catch (const error& e) {
  auto why = e.cause();
  why.rank = by;
  inner().peer_lost(why);
}

std::vector<bool> comm_fabric::open_arenas(std::vector<std::string> handles) {
  for (uint64_t i = 0; i < handles.size(); ++i)
    if (rank_id{i} == self() || !router_.link_to(rank_id{i}).same_node)
      handles[i].clear();
  return arenas_.open(handles);
}

bool comm_fabric::awaits_device(comm_stage at, const comm_message_ptr& x) {
  if (std::ranges::all_of(x->content.body.tensors,
                          [](auto& t) { return t.ready == nullptr; }))
    return false;
  x->copying = true;
  if (waits_->add(at, x))
    hand_over_(at, nullptr, std::min(device_patience_, between_looks));
  return true;
}

void comm_fabric::look_for_late(comm_stage at) {
  auto [late, failed, again] = waits_->look(device_waits::clock::now()
                                            - device_patience_);
  for (auto& x : late)
    // Who uses what arrived hears of the failure, and can say where.
    if (failed && x.what->number == 0)
      turn(x.at, std::move(x.what));
    else
      give_up(*x.what, x.tensor, failed);
  if (again)
    hand_over_(at, nullptr, std::min(device_patience_, between_looks));
}

void comm_fabric::give_up(comm_message& x, size_t tensor, bool failed) {
  auto& t = x.content.body.tensors[tensor];
  auto outgoing = x.number != 0;
  auto text = "tensor " + std::to_string(tensor) + " of a message "
              + (outgoing ? "to" : "from") + " rank "
              + std::to_string(x.peer.value) + ", of "
              + device_name(t.home == device_ref{} ? t.device : t.home)
              + (failed ? which_has_failed
                        : ", is not ready after "
                            + std::to_string(device_patience_.count()) + " ms");
  // The device may still write there.
  waits_->abandon(std::exchange(x.sources, {}));
  waits_->abandon(std::exchange(x.content.body.tensors, {}));
  if (outgoing) {
    ledger_.leave(x.number);
    return x.finish({error_code::transport, self(), {}, std::move(text)});
  }
  // Whoever waits for the message hears of it as of a lost rank: nothing that
  // this rank computes on the device is right any more.
  inner().peer_lost({error_code::transport, x.peer, {}, std::move(text)});
}

} // namespace smp
