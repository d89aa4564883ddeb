#include "actors/host/node_status.hpp"

namespace smp {

namespace {

template <class T>
status_item item(const char* name, T x) {
  return {name, std::to_string(x)};
}

} // namespace

actor_status actor_entries::entry(const char* id, const char* name) const {
  actor_status result;
  result.id = prefix_ + id;
  result.name = name;
  return result;
}

actor_status actor_entries::silent(actor_status x) const {
  x.answers = false;
  return x;
}

actor_status actor_entries::server(const server_counts& x) const {
  auto result = entry("server", "MODULE SERVER");
  result.state = x.in_step ? "IN STEP" : "BETWEEN STEPS";
  result.items = {item("step", x.step.value), item("ready", x.ready),
                  item("held", x.held),       item("blocked", x.blocked),
                  item("later", x.later),     item("pending", x.pending),
                  item("dropped", x.dropped), item("unknown", x.unknown)};
  return result;
}

actor_status actor_entries::silent_server() const {
  return silent(entry("server", "MODULE SERVER"));
}

actor_status actor_entries::context(const context_status& x) const {
  auto result = entry("context.", "WORKER CONTEXT");
  result.id += std::to_string(x.context.value);
  result.parent = prefix_ + "server";
  result.state = to_string(x.state);
  result.waits_for = x.waits_for;
  result.seconds = x.seconds;
  if (x.state != context_state::idle) {
    result.items = {
      {"request", std::to_string(x.current.origin.value) + '.'
                    + std::to_string(x.current.number)},
      item("module", x.module.value),
      item("microbatch", x.microbatch.value),
      {"phase", x.what == phase::forward ? "forward" : "backward"}};
  }
  result.items.push_back(item("served", x.served));
  return result;
}

actor_status actor_entries::scheduler(const scheduler_status& x) const {
  auto result = entry("scheduler", "PIPELINE SCHEDULER");
  result.parent = prefix_ + "server";
  if (!x.asks.empty()) {
    result.waits_for = x.asks;
    result.seconds = x.seconds;
  }
  result.items = {item("step", x.step.value), item("running", x.running),
                  item("left", x.left)};
  return result;
}

actor_status actor_entries::schedule(const scheduler_status& x) const {
  auto result = entry("schedule", "SCHEDULE ACTOR");
  result.parent = prefix_ + "scheduler";
  result.state = "OWES AN ANSWER";
  result.seconds = x.seconds;
  return result;
}

actor_status actor_entries::watch(const rank_view& x) const {
  auto result = entry("watch", "RANK WATCH");
  result.items = {item("progress", x.progress), item("refused", x.refused)};
  return result;
}

actor_status actor_entries::stage(const comm_stage_status& x) const {
  std::string id;
  for (const auto* c = to_string(x.stage); *c != 0; ++c)
    id += *c == ' '                ? '-'
          : *c >= 'A' && *c <= 'Z' ? static_cast<char>(*c - 'A' + 'a')
                                   : *c;
  auto result = entry(id.c_str(), to_string(x.stage));
  result.items = {item("handled", x.handled), item("bytes", x.bytes),
                  item("passed by", x.passed_by), item("held", x.held)};
  return result;
}

} // namespace smp
