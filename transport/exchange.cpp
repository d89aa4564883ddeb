#include "transport/exchange.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

namespace smp {

// -- envelope -----------------------------------------------------------------
// u64 sequence number, u32 size of the tag, tag, then the bytes of the user.

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t fixed_size = sizeof(uint64_t) + sizeof(uint32_t);

struct envelope {
  uint64_t sequence = 0;
  std::string tag;
  std::vector<std::byte> bytes;
};

std::vector<std::byte> encode(uint64_t sequence, const std::string& tag,
                              const std::vector<std::byte>& bytes) {
  auto tag_size = static_cast<uint32_t>(tag.size());
  std::vector<std::byte> result(fixed_size + tag.size() + bytes.size());
  auto out = result.data();
  std::memcpy(out, &sequence, sizeof sequence);
  std::memcpy(out + sizeof sequence, &tag_size, sizeof tag_size);
  std::memcpy(out + fixed_size, tag.data(), tag.size());
  std::copy(bytes.begin(), bytes.end(), out + fixed_size + tag.size());
  return result;
}

std::optional<envelope> decode(const std::vector<std::byte>& x) {
  if (x.size() < fixed_size)
    return std::nullopt;
  envelope result;
  uint32_t tag_size = 0;
  std::memcpy(&result.sequence, x.data(), sizeof result.sequence);
  std::memcpy(&tag_size, x.data() + sizeof result.sequence, sizeof tag_size);
  if (tag_size > x.size() - fixed_size)
    return std::nullopt;
  auto tag = reinterpret_cast<const char*>(x.data()) + fixed_size;
  result.tag.assign(tag, tag_size);
  result.bytes.assign(x.begin()
                        + static_cast<ptrdiff_t>(fixed_size + tag_size),
                      x.end());
  return result;
}

// -- tags ---------------------------------------------------------------------
// A kind before the name, so that a collective never meets a point to point
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
                               {"exchange \"" + name + "\"", from});
}

// A send to a lost rank needs no word: whoever waits for an answer hears it.
void exchange::send_tagged(rank_id to, const std::string& tag, payload x) {
  uint64_t sequence = 0;
  {
    std::lock_guard guard{mutex_};
    sequence = sent_[{to, tag}]++;
  }
  x.bytes = encode(sequence, tag, x.bytes);
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
                                          const std::string& name,
                                          payload x) {
  auto self = fabric_.self();
  check_group(group, self, name);
  auto tag = group_tag('g', group, name);
  for (auto rank : group)
    if (rank != self)
      send_tagged(rank, tag, x);
  // All posted before the first wait: a thread that comes with the same name
  // meanwhile must not get in between.
  std::vector<awaited_ptr> posted;
  for (auto rank : group)
    posted.push_back(rank == self ? nullptr : post_receive(rank, tag));
  std::vector<payload> result;
  for (size_t i = 0; i < group.size(); ++i) {
    if (group[i] == self)
      result.push_back(std::move(x));
    else
      result.push_back(awaited<payload>::get(
        posted[i], {"exchange \"" + name + "\"", group[i]}));
  }
  return result;
}

void exchange::barrier(std::span<const rank_id> group,
                       const std::string& name) {
  all_gather(group, "barrier " + name, {});
}

std::vector<double> exchange::all_reduce_sum(std::span<const rank_id> group,
                                             const std::string& name,
                                             std::vector<double> x) {
  payload mine;
  mine.bytes.resize(x.size() * sizeof(double));
  if (!x.empty())
    std::memcpy(mine.bytes.data(), x.data(), mine.bytes.size());
  auto values = all_gather(group, "sum " + name, std::move(mine));
  std::vector<double> result(x.size(), 0.0);
  for (size_t i = 0; i < values.size(); ++i) {
    auto& bytes = values[i].bytes;
    if (bytes.size() != x.size() * sizeof(double))
      throw error{failure{error_code::protocol, group[i], {},
                          "sum \"" + name + "\" over "
                            + std::to_string(bytes.size() / sizeof(double))
                            + " values where rank "
                            + std::to_string(fabric_.self().value) + " has "
                            + std::to_string(x.size())}};
    for (size_t j = 0; j < result.size(); ++j) {
      double value = 0;
      std::memcpy(&value, bytes.data() + j * sizeof value, sizeof value);
      result[j] += value;
    }
  }
  return result;
}

payload exchange::broadcast(std::span<const rank_id> group,
                            const std::string& name, rank_id root,
                            payload x) {
  auto self = fabric_.self();
  check_group(group, self, name);
  check_group(group, root, name);
  auto tag = group_tag('b', group, name);
  if (self != root)
    return awaited<payload>::get(post_receive(root, tag),
                                 {"exchange \"" + name + "\"", root});
  for (auto rank : group)
    if (rank != self)
      send_tagged(rank, tag, x);
  return x;
}

// -- called by the session ----------------------------------------------------

void exchange::deliver(rank_id from, message x) {
  awaited_ptr target;
  std::string trouble;
  auto parsed = decode(x.body.bytes);
  if (!parsed) {
    trouble = "an exchange of " + std::to_string(x.body.bytes.size())
              + " bytes that cannot be read";
  } else {
    x.body.bytes = std::move(parsed->bytes);
    std::lock_guard guard{mutex_};
    auto& s = slots_[{from, parsed->tag}];
    if (auto i = s.waiting.find(parsed->sequence); i != s.waiting.end()) {
      target = std::move(i->second);
      s.waiting.erase(i);
    } else if (parsed->sequence < s.next_receive
               || !s.arrived.emplace(parsed->sequence, std::move(x.body))
                     .second) {
      trouble = "exchange \"" + name_of(parsed->tag) + "\" number "
                + std::to_string(parsed->sequence) + " twice";
    }
  }
  if (target)
    target->set_value(std::move(x.body));
  if (!trouble.empty())
    peer_lost({error_code::protocol, from, {}, "sent " + trouble});
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
