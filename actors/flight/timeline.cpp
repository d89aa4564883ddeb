#include "actors/flight/timeline.hpp"

#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace smp {

namespace {

using kind = flight_slice::kind;

/// Builds a timeline, event by event.
class timeline_builder {
public:
  explicit timeline_builder(flight_timeline& to) : to_(to) {
    // nop
  }

  void add(const flight_event& x);

  void finish(int64_t end);

private:
  struct context {
    std::optional<flight_slice> execution, executing, waiting;
    std::vector<flight_slice> modules;
  };

  using transfer_key = std::pair<uint64_t, uint32_t>;

  using collective_key = std::tuple<uint32_t, uint64_t, uint32_t, uint32_t,
                                    phase>;

  static collective_key key_of(const flight_event& x) {
    return {x.name, x.number, x.step, x.microbatch, x.what};
  }

  static flight_slice begin(kind what, const flight_event& x);

  void end(std::optional<flight_slice>& x, int64_t time) {
    if (x)
      end(*std::exchange(x, std::nullopt), time);
  }

  void end(flight_slice x, int64_t time) {
    x.end = time;
    to_.slices.push_back(x);
  }

  template <class Map>
  void end(Map& open, const typename Map::key_type& key, int64_t time) {
    if (auto i = open.find(key); i != open.end())
      end(open.extract(i).mapped(), time);
  }

  void add_to_context(const flight_event& x);
  void add_period(const flight_event& x);
  void end_modules(context& x, int64_t time);
  flight_moment moment_of(const flight_event& x);

  flight_timeline& to_;
  std::optional<flight_slice> step_;
  std::vector<flight_slice> activities_;
  std::map<uint32_t, context> contexts_;
  std::map<transfer_key, flight_slice> transfers_;
  std::map<collective_key, flight_slice> collectives_;
};

flight_slice timeline_builder::begin(kind what, const flight_event& x) {
  flight_slice result;
  result.what = what;
  result.begin = x.time;
  result.name = x.name;
  result.step = x.step;
  result.microbatch = x.microbatch;
  result.in = x.what;
  result.context = x.context;
  result.peer = x.peer;
  result.bytes = x.amount;
  result.request = x.request();
  return result;
}

flight_moment timeline_builder::moment_of(const flight_event& x) {
  flight_moment result;
  result.time = x.time;
  result.request = x.request();
  result.peer = rank_id{x.peer};
  result.context = x.context;
  return result;
}

void timeline_builder::end_modules(context& x, int64_t time) {
  while (!x.modules.empty()) {
    end(x.modules.back(), time);
    x.modules.pop_back();
  }
}

void timeline_builder::add_to_context(const flight_event& x) {
  auto& ctx = contexts_[x.context];
  switch (x.kind) {
    case flight_kind::executes:
      ctx = {};
      ctx.execution = begin(kind::execution, x);
      ctx.executing = begin(kind::executing, x);
      break;
    case flight_kind::parked:
      end(ctx.executing, x.time);
      if (ctx.execution) {
        ctx.waiting = begin(kind::waiting, x);
        // Known when the request leaves.
        ctx.waiting->request = {};
      }
      break;
    case flight_kind::resumed:
      end(ctx.waiting, x.time);
      if (ctx.execution)
        ctx.executing = begin(kind::executing, x);
      break;
    case flight_kind::ended:
      end(ctx.executing, x.time);
      end(ctx.waiting, x.time);
      end_modules(ctx, x.time);
      end(ctx.execution, x.time);
      break;
    case flight_kind::module_begins:
      if (ctx.execution)
        ctx.modules.push_back(begin(kind::module, x));
      break;
    default: // module_ends
      if (!ctx.modules.empty()) {
        end(ctx.modules.back(), x.time);
        ctx.modules.pop_back();
      }
  }
}

void timeline_builder::add_period(const flight_event& x) {
  using enum flight_kind;
  switch (x.kind) {
    case transfer_begins:
      transfers_[{x.number, x.peer}] = begin(kind::transfer, x);
      if (step_)
        transfers_[{x.number, x.peer}].step = step_->step;
      break;
    case transfer_ends:
      end(transfers_, {x.number, x.peer}, x.time);
      break;
    case collective_begins:
      collectives_[key_of(x)] = begin(kind::collective, x);
      break;
    case collective_ends:
      end(collectives_, key_of(x), x.time);
      break;
    case activity_begins:
      activities_.push_back(begin(kind::activity, x));
      break;
    default: // activity_ends
      if (!activities_.empty()) {
        end(activities_.back(), x.time);
        activities_.pop_back();
      }
  }
}

void timeline_builder::add(const flight_event& x) {
  using enum flight_kind;
  switch (x.kind) {
    case step_begins:
      step_ = begin(kind::step, x);
      break;
    case step_ends:
      end(step_, x.time);
      break;
    case asked:
      // The context is parked already, unless this is a promise.
      if (auto& waits = contexts_[x.context].waiting;
          waits && waits->request.number == 0 && waits->peer == x.peer
          && waits->name == x.name)
        waits->request = x.request();
      to_.asked.push_back(moment_of(x));
      break;
    case reply:
      to_.replies.push_back(moment_of(x));
      break;
    case arrived:
      to_.arrived.push_back(moment_of(x));
      break;
    case answered:
      to_.answered.push_back(moment_of(x));
      break;
    case transfer_begins:
    case transfer_ends:
    case collective_begins:
    case collective_ends:
    case activity_begins:
    case activity_ends:
      add_period(x);
      break;
    case memory:
      to_.memory.emplace_back(x.time, x.amount);
      break;
    case executes:
    case parked:
    case resumed:
    case ended:
    case module_begins:
    case module_ends:
      add_to_context(x);
      break;
    case none:
    case admitted:
    case tensors_arrived:
    case failed:
      break; // moments
  }
}

void timeline_builder::finish(int64_t time) {
  auto first = to_.slices.size();
  end(step_, time);
  for (auto& x : activities_)
    end(x, time);
  for (auto& [number, x] : contexts_) {
    end(x.executing, time);
    end(x.waiting, time);
    end_modules(x, time);
    end(x.execution, time);
  }
  for (auto& [key, x] : transfers_)
    end(x, time);
  for (auto& [key, x] : collectives_)
    end(x, time);
  for (auto i = first; i < to_.slices.size(); ++i)
    to_.slices[i].open = true;
}

} // namespace

flight_timeline timeline_of(const flight_log& x) {
  flight_timeline result;
  timeline_builder builder{result};
  for (auto& y : x.events)
    builder.add(y);
  builder.finish(x.events.empty() ? 0 : x.events.back().time);
  return result;
}

const char* category_of(const flight_slice& x) noexcept {
  auto phases = x.in == phase::forward ? "forward" : "backward";
  switch (x.what) {
    case kind::step:
      return "step";
    case kind::activity:
      return "user";
    case kind::executing:
    case kind::execution:
    case kind::module:
      return phases;
    case kind::waiting:
      return "wait";
    case kind::transfer:
      return "transfer";
    case kind::collective:
      return "collective";
  }
  return "";
}

std::string name_of(uint32_t name, const flight_log& from) {
  auto& known = from.name(name);
  if (!known.empty() || name >= first_text_name)
    return known;
  return name == 0 ? "step body" : "module " + std::to_string(name);
}

std::string title_of(const flight_slice& x, const flight_log& from) {
  auto name = name_of(x.name, from);
  auto in_microbatch = std::string{category_of(x)} + ' ' + name + " mb "
                       + std::to_string(x.microbatch);
  switch (x.what) {
    case kind::step:
      return x.step == 0 ? "step without update"
                         : "step " + std::to_string(x.step);
    case kind::transfer:
      return "to rank " + std::to_string(x.peer);
    case kind::executing:
    case kind::execution:
    case kind::module:
      return in_microbatch;
    case kind::waiting:
      return "waits for " + name
             + (x.peer == flight_event::no_peer
                  ? ""
                  : " from rank " + std::to_string(x.peer));
    case kind::activity:
    case kind::collective:
      return name;
  }
  return name;
}

} // namespace smp
