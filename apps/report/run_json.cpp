#include "apps/report/run_json.hpp"

#include "apps/report/run_text.hpp"
#include "apps/report/text_layout.hpp"

#include <cmath>

namespace smp::app {

namespace {

template <class T>
json or_null(const std::optional<T>& x) {
  return x ? json(*x) : json{};
}

json arena_json(const arena_status& x) {
  return {{"capacity", x.capacity},     {"used", x.used},
          {"high_water", x.high_water}, {"fragmentation", x.fragmentation()},
          {"blocks", x.blocks},         {"refused", x.refused}};
}

/// Tensors by the rule that decided their path.
json rules_json(const comm_report& x) {
  auto result = json::object();
  for (size_t i = 0; i < comm_rules; ++i)
    result[smp::to_string(static_cast<comm_rule>(i))] = {
      {"sent", x.sent[i]}, {"received", x.received[i]}};
  return result;
}

/// What each stage did.
json stages_json(const comm_report& x) {
  auto result = json::object();
  for (auto& y : x.stages)
    result[smp::to_string(y.stage)] = {{"handled", y.handled},
                                       {"bytes", y.bytes},
                                       {"passed_by", y.passed_by},
                                       {"held", y.held}};
  return result;
}

/// The oldest messages that are not sent yet.
json under_way_json(const comm_report& x) {
  auto result = json::array();
  for (auto& y : x.oldest)
    result.push_back({{"message", y.number},
                      {"to", y.peer.value},
                      {"bytes", y.bytes},
                      {"at", smp::to_string(y.at)},
                      {"waits_for", printable(y.waits_for)},
                      {"seconds", y.seconds}});
  return result;
}

json tree_below(const std::vector<actor_status>& all, const std::string& parent,
                size_t depth) {
  auto result = json::array();
  if (depth > all.size())
    return result;
  for (auto& x : all)
    if (x.parent == parent) {
      auto y = to_json(x);
      y["children"] = tree_below(all, x.id, depth + 1);
      result.push_back(std::move(y));
    }
  return result;
}

} // namespace

json head_json(const std::string& place, const run_look& x) {
  auto problems = problems_of(x);
  json result{{"run", printable(place)},
              {"state", to_string(x.what)},
              {"text", printable(x.text)},
              {"healthy", problems.empty()}};
  auto& all = result["problems"] = json::array();
  for (auto& line : problems)
    all.push_back(printable(line));
  auto& last = x.files.last;
  result["step"] = last ? json(last->step) : json{};
  result["steps"] = x.files.steps > 0 ? json(x.files.steps) : json{};
  result["loss"] = last ? or_null(last->loss) : json{};
  result["step_seconds"] = last ? json(last->step_seconds) : json{};
  result["samples_per_second"] = last ? json(last->samples_per_second) : json{};
  if (x.files.exit_code)
    result["exit_code"] = *x.files.exit_code;
  if (x.status) {
    result["stalled"] = x.status->stalls.standing;
    result["quiet_seconds"] = x.status->stalls.quiet_seconds;
  }
  return result;
}

json to_json(const actor_status& x) {
  json result{
    {"id", printable(x.id)},         {"actor", printable(x.name)},
    {"parent", printable(x.parent)}, {"answers", x.answers},
    {"state", printable(x.state)},   {"waits_for", printable(x.waits_for)},
    {"seconds", x.seconds}};
  auto& items = result["items"] = json::object();
  for (auto& item : x.items)
    items[printable(item.name)] = printable(item.value);
  return result;
}

json actors_json(const run_status& x) {
  auto result = json::array();
  for (auto& y : actors_of(x))
    result.push_back(to_json(y));
  return result;
}

json tree_json(const run_status& x) {
  return tree_below(actors_of(x), {}, 0);
}

json health_json(const run_status& x) {
  json result = json::array();
  for (auto& y : x.ranks)
    result.push_back({{"rank", y.rank.value},
                      {"health", smp::to_string(y.health)},
                      {"state", printable(state_of(y))},
                      {"why", printable(y.why)},
                      {"silent_seconds", y.seconds}});
  return result;
}

json waits_json(const run_status& x) {
  auto waits = waits_of(x);
  json result{{"chain", printable(waits.chain)}};
  auto& all = result["all"] = json::array();
  for (auto& line : waits.all)
    all.push_back(printable(line));
  return result;
}

json comm_json(const run_status& x) {
  auto result = json::array();
  for (auto& rank : x.ranks) {
    json y{{"rank", rank.rank.value}, {"health", smp::to_string(rank.health)}};
    if (rank.known) {
      auto& comm = rank.status.comm;
      y["messages_sent"] = comm.messages_sent;
      y["bytes_sent"] = comm.bytes_sent;
      y["messages_received"] = comm.messages_received;
      y["bytes_received"] = comm.bytes_received;
      y["messages_refused"] = comm.messages_refused;
      y["arena_high_water"] = or_null(comm.arena_high_water());
      y["device_path"] = comm.stages.device_path;
      if (comm.stages.device_path) {
        y["send_arena"] = arena_json(comm.stages.send_arena);
        y["receive_arena"] = arena_json(comm.stages.receive_arena);
      }
      y["stages"] = stages_json(comm.stages);
      y["tensors"] = rules_json(comm.stages);
      y["under_way"] = under_way_json(comm.stages);
      auto& peers = y["peers"] = json::array();
      for (auto& peer : rank.status.view.peers)
        peers.push_back({{"rank", peer.peer.value},
                         {"sent", peer.sent},
                         {"taken", peer.taken},
                         {"queued", peer.queued}});
    }
    result.push_back(std::move(y));
  }
  return result;
}

json to_json(const rank_row& x) {
  json result{{"rank", x.rank},
              {"health", smp::to_string(x.health)},
              {"state", printable(x.state)},
              {"busy", or_null(x.busy)},
              {"bubble", or_null(x.bubble)},
              {"queue", or_null(x.queue)},
              {"bytes_out_per_second", or_null(x.out)},
              {"bytes_in_per_second", or_null(x.in)},
              {"bytes_sent", or_null(x.bytes_sent)},
              {"bytes_received", or_null(x.bytes_received)},
              {"arena_high_water", or_null(x.arena)},
              {"memory", or_null(x.memory)},
              {"peak_memory", or_null(x.peak_memory)}};
  if (!x.device.empty()) {
    result["device"] = printable(x.device);
    result["device_memory"] = or_null(x.device_memory);
    result["device_peak_memory"] = or_null(x.device_peak_memory);
    result["device_total_memory"] = or_null(x.device_total_memory);
  }
  return result;
}

} // namespace smp::app
