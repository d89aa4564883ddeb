#include "apps/report/run_text.hpp"

#include "apps/report/rank_table.hpp"
#include "apps/report/text_layout.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace smp::app {

namespace {

/// What the stages of communication of a rank did and hold.
void add_stages(std::string& to, const comm_report& x) {
  for (size_t i = 0; i < comm_rules; ++i)
    if (x.sent[i] + x.received[i] > 0)
      to += fmt::format("  tensors by rule \"{}\": {} sent, {} received\n",
                        smp::to_string(static_cast<comm_rule>(i)),
                        with_commas(x.sent[i]), with_commas(x.received[i]));
  auto add_arena = [&to](const char* name, const arena_status& y) {
    to += fmt::format("  {} arena: {} of {} used, {} at most, {} refused\n",
                      name, bytes_text(y.used), bytes_text(y.capacity),
                      bytes_text(y.high_water), y.refused);
  };
  if (x.device_path) {
    add_arena("send", x.send_arena);
    add_arena("receive", x.receive_arena);
  }
  for (auto& y : x.peers)
    if (y.open + y.queued > 0)
      to += fmt::format(
        "  to r{}: {} large ones under way ({}), {} wait for "
        "room ({})\n",
        y.peer.value, y.open, bytes_text(y.open_bytes), y.queued,
        bytes_text(y.queued_bytes));
  for (auto& y : x.oldest)
    to += fmt::format("  message {} to r{}, {}: at {}{}{} for {}\n", y.number,
                      y.peer.value, bytes_text(y.bytes), smp::to_string(y.at),
                      y.waits_for.empty() ? "" : ", waits for ",
                      printable(y.waits_for), duration_text(y.seconds));
}

std::string state_word(const actor_status& x) {
  if (!x.state.empty() && x.name == "rank")
    return x.state; // says more
  return !x.answers ? "NO ANSWER" : x.state.empty() ? "-" : x.state;
}

std::string since_text(double seconds) {
  return seconds > 0 ? duration_text(seconds) : "-";
}

/// @returns "waits for ...", or what it holds in a few words
std::string details_of(const actor_status& x) {
  if (!x.waits_for.empty())
    return "waits for " + x.waits_for;
  constexpr size_t items = 6;
  constexpr size_t characters = 60;
  std::string result;
  for (size_t i = 0; i < std::min(items, x.items.size()); ++i)
    if (x.items[i].value.size() <= characters)
      result += fmt::format("{}{} {}", result.empty() ? "" : ", ",
                            x.items[i].name, x.items[i].value);
  return result;
}

constexpr size_t least_id = 16;

/// @returns the number of its ancestors; a rank may report anything
size_t depth_of(const actor_status& x, const std::vector<actor_status>& all) {
  size_t result = 0;
  for (auto* at = &x; !at->parent.empty() && result < all.size(); ++result) {
    auto i = std::ranges::find(all, at->parent, &actor_status::id);
    if (i == all.end())
      break;
    at = &*i;
  }
  return result;
}

/// @returns the width of the column of ids
size_t width_of_ids(const std::vector<actor_status>& all, bool as_tree) {
  auto result = least_id;
  for (auto& x : all)
    result = std::max(result,
                      x.id.size() + (as_tree ? 2 * depth_of(x, all) : 0));
  return result + 2;
}

void add_actor(std::string& to, size_t width, const std::string& id,
               const actor_status& x) {
  to += fmt::format("{:<{}}{:<20}{:<15}{:>8}  {}\n", printable(id), width,
                    printable(x.name), printable(state_word(x)),
                    since_text(x.seconds), printable(details_of(x)));
}

std::string offload_text(const offload_status& x) {
  auto result = fmt::format(
    "{} in a file of {}, {} at most, {} written, {} read, waited {}",
    bytes_text(x.bytes), bytes_text(x.file_bytes), bytes_text(x.peak_bytes),
    bytes_text(x.written), bytes_text(x.read), duration_text(x.wait_seconds));
  if (x.stayed > 0)
    result += fmt::format(", no room for {}", bytes_text(x.stayed));
  return result;
}

std::string device_text(const device_status& x) {
  if (x.peak_memory == 0)
    return fmt::format("{} (of {})", x.name, bytes_text(x.total_memory));
  return fmt::format("{} ({} used, {} at most, of {})", x.name,
                     bytes_text(x.memory), bytes_text(x.peak_memory),
                     bytes_text(x.total_memory));
}

std::string actor_head(size_t width) {
  return fmt::format("{:<{}}{:<20}{:<15}{:>8}  {}\n", "ID", width, "ACTOR",
                     "STATE", "SINCE", "HOLDS");
}

void add_tree(std::string& to, size_t width,
              const std::vector<actor_status>& all, const std::string& parent,
              size_t depth) {
  // A tree has fewer levels than nodes; a rank may report anything.
  if (depth > all.size())
    return;
  for (auto& x : all)
    if (x.parent == parent) {
      add_actor(to, width, std::string(2 * depth, ' ') + x.id, x);
      add_tree(to, width, all, x.id, depth + 1);
    }
}

} // namespace

std::vector<actor_status> actors_of(const run_status& x) {
  auto result = x.actors;
  for (auto& rank : x.ranks) {
    auto id = fmt::format("r{}", rank.rank.value);
    actor_status self;
    self.id = id;
    self.name = "rank";
    self.state = in_capitals(smp::to_string(rank.health));
    self.answers = is_well(rank.health) || rank.health == rank_health::blocked;
    self.seconds = is_well(rank.health) ? 0 : rank.seconds;
    self.items = {{"now", state_of(rank)}};
    if (rank.known) {
      self.items.push_back({"process", std::to_string(rank.status.pid)});
      self.items.push_back({"host", rank.status.host});
      self.items.push_back({"pp_rank", std::to_string(rank.status.pp_rank)});
      if (auto& x = rank.status.device)
        self.items.push_back({"device", device_text(*x)});
      if (auto& x = rank.status.offload)
        self.items.push_back({"offloaded", offload_text(*x)});
    }
    if (!rank.why.empty())
      self.items.push_back({"why", rank.why});
    // Earlier reports of a rank that is gone or stuck are outdated.
    auto answers = self.answers && rank.known;
    result.push_back(std::move(self));
    if (!answers)
      continue;
    for (auto y : rank.status.actors) {
      if (y.parent.empty())
        y.parent = id;
      result.push_back(std::move(y));
    }
  }
  return result;
}

std::string state_text(const std::string& place, const run_look& x) {
  auto result = fmt::format("{}: {}", place, to_string(x.what));
  if (auto progress = progress_text(x.files);
      !progress.empty() && x.what != run_look::state::ended)
    result += ", " + progress;
  if (!x.text.empty())
    result += ": " + x.text;
  result += '\n';
  for (auto& line : problems_of(x))
    if (line != x.text)
      result += "! " + line + '\n';
  return printable(result);
}

std::string actor_list(const run_status& x) {
  auto all = actors_of(x);
  auto width = width_of_ids(all, false);
  auto result = actor_head(width);
  for (auto& y : all)
    add_actor(result, width, y.id, y);
  return result;
}

std::string actor_tree(const run_status& x) {
  auto all = actors_of(x);
  auto width = width_of_ids(all, true);
  auto result = actor_head(width);
  add_tree(result, width, all, {}, 0);
  return result;
}

namespace {

/// @returns the rank of an actor, "r1.server", if that rank does not report
const rank_entry* silent_rank_of(const run_status& x, const std::string& id) {
  for (auto& y : x.ranks)
    if (id.starts_with(fmt::format("r{}.", y.rank.value))) {
      auto answers = is_well(y.health) || y.health == rank_health::blocked;
      return answers && y.known ? nullptr : &y;
    }
  return nullptr;
}

} // namespace

std::optional<actor_status> find_actor(const run_status& x,
                                       const std::string& id) {
  for (auto& y : actors_of(x))
    if (y.id == id)
      return y;
  auto* rank = silent_rank_of(x, id);
  if (rank == nullptr)
    return std::nullopt;
  actor_status result;
  result.id = id;
  result.parent = fmt::format("r{}", rank->rank.value);
  result.answers = false;
  result.seconds = rank->seconds;
  result.items = {
    {"why", fmt::format("rank {} is {}: {}", rank->rank.value,
                        smp::to_string(rank->health), rank->why)}};
  return result;
}

std::optional<std::string> actor_text(const run_status& x,
                                      const std::string& id) {
  auto i = find_actor(x, id);
  if (!i)
    return std::nullopt;
  std::string result;
  auto add = [&result](const std::string& name, const std::string& value) {
    if (!value.empty())
      result += fmt::format("{:<14}{}\n", printable(name), printable(value));
  };
  add("id", i->id);
  add("actor", i->name);
  add("made by", i->parent);
  add("state", i->answers ? i->state : "NO ANSWER");
  add("waits for", i->waits_for);
  if (i->seconds > 0)
    add("since", duration_text(i->seconds));
  for (auto& item : i->items)
    add(item.name, item.value);
  return result;
}

std::string health_text(const run_status& x) {
  std::string result;
  for (auto& y : x.ranks) {
    result += fmt::format("rank {:<5}{:<9}{}", y.rank.value,
                          smp::to_string(y.health), state_of(y));
    if (!is_well(y.health))
      result += fmt::format("; {}, last heard of {} ago", y.why,
                            duration_text(y.seconds));
    result += '\n';
  }
  return printable(result);
}

std::string waits_text(const run_status& x) {
  auto waits = waits_of(x);
  std::string result;
  if (x.stalls.quiet_seconds >= 1)
    result += fmt::format("nothing moved on any rank for {}\n",
                          duration_text(x.stalls.quiet_seconds));
  else
    result += "the run moves: these are the waits of a moment, and ranks were "
              "not asked at the same one\n";
  if (waits.chain.empty())
    result += "nobody waits\n";
  else
    result += printable(waits.chain) + '\n';
  if (!waits.all.empty())
    result += '\n';
  for (auto& line : waits.all)
    result += printable(line) + '\n';
  return result;
}

std::string comm_text(const run_status& x) {
  auto result = fmt::format("{:<6}{:>12}{:>12}{:>12}{:>12}{:>9}{:>12}\n",
                            "RANK", "MSGS OUT", "BYTES OUT", "MSGS IN",
                            "BYTES IN", "REFUSED", "ARENA");
  for (auto& rank : x.ranks) {
    auto& y = rank.status.comm;
    if (!rank.known) {
      result += fmt::format("r{:<5}{}\n", rank.rank.value,
                            smp::to_string(rank.health));
      continue;
    }
    result += fmt::format(
      "r{:<5}{:>12}{:>12}{:>12}{:>12}{:>9}{:>12}\n", rank.rank.value,
      with_commas(y.messages_sent), bytes_text(y.bytes_sent),
      with_commas(y.messages_received), bytes_text(y.bytes_received),
      y.messages_refused,
      y.stages.device_path ? bytes_text(*y.arena_high_water()) : "-");
    for (auto& peer : rank.status.view.peers)
      result += fmt::format(
        "  r{} -> r{}: {} sent, {} taken from there, {} wait for credits\n",
        rank.rank.value, peer.peer.value, with_commas(peer.sent),
        with_commas(peer.taken), peer.queued);
    add_stages(result, y.stages);
  }
  return result;
}

} // namespace smp::app
