#include "transport/exchange.hpp"

#include "transport/bytes.hpp"
#include "transport/exchange_label.hpp"

#include <algorithm>
#include <optional>

namespace smp {

namespace {

// -- envelope -----------------------------------------------------------------

std::vector<std::byte> attach(const exchange_label& x,
                              const std::vector<std::byte>& bytes) {
  byte_writer out;
  out.reserve(sizeof(uint64_t) + sizeof(uint32_t) + x.tag.size()
              + bytes.size());
  out.put(x);
  out.raw(bytes);
  return out.take();
}

/// Leaves only the user's bytes. @throws error (protocol)
exchange_label detach(std::vector<std::byte>& bytes) {
  byte_reader in{bytes, "exchange"};
  auto result = in.get<exchange_label>();
  bytes.erase(bytes.begin(),
              bytes.begin() + static_cast<ptrdiff_t>(in.position()));
  return result;
}

wait_reason message_from(rank_id from, const std::string& name) {
  return {.what = "exchange \"" + name + "\"",
          .from = from,
          .subject = {.what = wait_subject::kind::exchange, .name = name}};
}

// -- tags ---------------------------------------------------------------------
// The kind precedes the name, so that a collective never meets a point to point
// message or another collective of the same name.

std::string point_tag(const std::string& name) {
  return "p:" + name;
}

/// Two groups that share ranks may use one name in different orders, so the
/// group is a part of the tag.
std::string group_tag(char kind, std::span<const rank_id> group,
                      const std::string& name) {
  std::string result{kind};
  for (auto& rank : group)
    result += '.' + std::to_string(rank.value);
  return result + ':' + name;
}

/// @returns the name that the user gave.
std::string name_of(const std::string& tag) {
  return tag.substr(tag.find(':') + 1);
}

void check_group(std::span<const rank_id> group, rank_id member,
                 const std::string& name) {
  if (std::find(group.begin(), group.end(), member) == group.end())
    throw error{error_code::internal, "rank " + std::to_string(member.value)
                                        + " is not in the group of \"" + name
                                        + "\""};
  auto ascends = [](rank_id a, rank_id b) { return a >= b; };
  if (std::adjacent_find(group.begin(), group.end(), ascends) != group.end())
    throw error{error_code::internal,
                "the group of \"" + name + "\" is not in ascending order"};
}

} // namespace

// -- point to point -----------------------------------------------------------

exchange::exchange(fabric& x) : fabric_(x) {
  // nop
}

exchange::~exchange() = default;

void exchange::send(rank_id to, const std::string& name, payload x) {
  send_tagged(to, point_tag(name), std::move(x));
}

payload exchange::receive(rank_id from, const std::string& name) {
  return awaited<payload>::get(post_receive(from, point_tag(name)),
                               message_from(from, name));
}

// A failed send to a lost rank is not reported: a rank that waits for an answer
// hears of the loss.
void exchange::send_tagged(rank_id to, const std::string& tag, payload x) {
  uint64_t sequence = 0;
  {
    std::lock_guard guard{mutex_};
    sequence = sent_[{to, tag}]++;
  }
  x.bytes = attach({sequence, tag}, x.bytes);
  fabric_.send(to, {message_kind::exchange, std::move(x)});
}

exchange::awaited_ptr exchange::post_receive(rank_id from,
                                             const std::string& tag) {
  auto result = std::make_shared<awaited<payload>>();
  std::lock_guard guard{mutex_};
  auto& s = slots_[{from, tag}];
  auto sequence = s.next_receive++;
  if (auto i = s.arrived.find(sequence); i != s.arrived.end()) {
    result->set_value(std::move(i->second));
    s.arrived.erase(i);
  } else if (auto j = lost_.find(from); j != lost_.end()) {
    result->fail(j->second);
  } else {
    s.waiting.emplace(sequence, result);
  }
  return result;
}

// -- collectives --------------------------------------------------------------

std::vector<payload> exchange::all_gather(std::span<const rank_id> group,
                                          const std::string& name, payload x) {
  auto self = fabric_.self();
  check_group(group, self, name);
  auto tag = group_tag('g', group, name);
  for (auto rank : group)
    if (rank != self)
      send_tagged(rank, tag, x);
  // Post all receives before the first wait: another thread that uses the same
  // name must not get in between.
  std::vector<awaited_ptr> posted;
  for (auto rank : group)
    posted.push_back(rank == self ? nullptr : post_receive(rank, tag));
  std::vector<payload> result(group.size());
  for (size_t i = 0; i < group.size(); ++i)
    if (posted[i])
      result[i] = awaited<payload>::get(posted[i],
                                        message_from(group[i], name));
  auto own = std::find(group.begin(), group.end(), self) - group.begin();
  result[static_cast<size_t>(own)] = std::move(x);
  return result;
}

void exchange::barrier(std::span<const rank_id> group,
                       const std::string& name) {
  all_gather(group, "barrier " + name, {});
}

std::vector<double> exchange::all_reduce_sum(std::span<const rank_id> group,
                                             const std::string& name,
                                             std::vector<double> x) {
  auto values = all_gather(group, "sum " + name, to_payload(x));
  std::vector<double> result(x.size(), 0.0);
  for (size_t i = 0; i < values.size(); ++i) {
    auto theirs = from_payload<std::vector<double>>(values[i],
                                                    "numbers to sum");
    if (theirs.size() != x.size())
      throw error{
        failure{error_code::protocol,
                group[i],
                {},
                "sum \"" + name + "\" over " + std::to_string(theirs.size())
                  + " values where rank " + std::to_string(fabric_.self().value)
                  + " has " + std::to_string(x.size())}};
    for (size_t j = 0; j < result.size(); ++j)
      result[j] += theirs[j];
  }
  return result;
}

payload exchange::broadcast(std::span<const rank_id> group,
                            const std::string& name, rank_id root, payload x) {
  auto self = fabric_.self();
  check_group(group, self, name);
  check_group(group, root, name);
  auto tag = group_tag('b', group, name);
  if (self != root)
    return awaited<payload>::get(post_receive(root, tag),
                                 message_from(root, name));
  for (auto rank : group)
    if (rank != self)
      send_tagged(rank, tag, x);
  return x;
}

// -- called by the session ----------------------------------------------------

void exchange::deliver(rank_id from, message x) {
  awaited_ptr target;
  std::string trouble;
  try {
    auto [sequence, tag] = detach(x.body.bytes);
    std::lock_guard guard{mutex_};
    auto& s = slots_[{from, tag}];
    if (auto i = s.waiting.find(sequence); i != s.waiting.end()) {
      target = std::move(i->second);
      s.waiting.erase(i);
    } else if (sequence < s.next_receive
               || !s.arrived.emplace(sequence, std::move(x.body)).second) {
      trouble = "sent exchange \"" + name_of(tag) + "\" number "
                + std::to_string(sequence) + " twice";
    }
  } catch (const error& e) {
    trouble = e.what();
  }
  if (target)
    target->set_value(std::move(x.body));
  if (!trouble.empty())
    peer_lost({error_code::protocol, from, {}, trouble});
}

void exchange::fail(rank_id from, const failure& x) {
  std::vector<awaited_ptr> failed;
  {
    std::lock_guard guard{mutex_};
    lost_.emplace(from, x);
    for (auto& [k, s] : slots_) {
      if (k.first != from)
        continue;
      for (auto& [sequence, w] : s.waiting)
        failed.push_back(std::move(w));
      s.waiting.clear();
    }
  }
  for (auto& w : failed)
    w->fail(x);
}

} // namespace smp
