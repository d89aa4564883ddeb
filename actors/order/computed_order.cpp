#include "actors/order/computed_order.hpp"

#include "actors/protocol/result_name.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace smp {

namespace {

/// Forward work of a device per microbatch, in units of time. It is the least
/// common multiple of 1 to 16: up to 16 segments share it without a remainder,
/// so that equal work takes equally long on all devices.
constexpr uint64_t work_per_device = 720720;

/// The work of each segment in a program, by device: its share of the work of
/// the device, as stages are meant to be balanced. Measured times are not used,
/// as they differ from run to run.
std::vector<std::vector<uint64_t>> work_of_segments(const pipeline_program& x,
                                                    size_t devices) {
  std::vector<std::vector<uint64_t>> result(devices);
  for (auto& link : x.chain)
    result.at(link.device).push_back(link.forward > 0);
  for (auto& segments : result) {
    auto working = std::accumulate(segments.begin(), segments.end(),
                                   uint64_t{0});
    if (working > 0)
      for (auto& work : segments)
        work *= work_per_device / working;
  }
  return result;
}

/// Runs the recorded flow of a step on a clock of its own.
class step_simulation {
public:
  step_simulation(const std::vector<step_record>& records,
                  const std::vector<rank_id>& pipeline, schedule& policy,
                  const order_rules& rules)
    : records_(records),
      pipeline_(pipeline),
      policy_(policy),
      forward_alone_(rules.forward_alone),
      work_(work_of_segments(rules.program, records.size())) {
    for (size_t rank = 0; rank < records.size(); ++rank) {
      auto& state = ranks_.emplace_back();
      state.order = rules.service.at(rank);
      state.segments.resize(records[rank].microbatches);
      result_.served.emplace_back();
      auto executions = records[rank].executions.size();
      for (uint32_t execution = 0; execution < executions; ++execution)
        find_stops(rank, execution);
    }
  }

  pipeline_order run() {
    ask_policy();
    serve();
    while (!running_.empty()) {
      now_ = running_.top().time;
      end_segments_of_now();
      serve();
    }
    check_all_served();
    return std::move(result_);
  }

private:
  /// A segment of an execution on a rank.
  struct place {
    size_t rank = 0;
    uint32_t execution = 0;
    uint32_t segment = 0;

    place next() const {
      return {rank, execution, segment + 1};
    }
  };

  struct ready_segment {
    ready_key key;
    place where;
  };

  /// When a segment ends.
  struct segment_end {
    uint64_t time;
    uint64_t number; // breaks ties
    place where;

    bool operator<(const segment_end& other) const { // the top is the earliest
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  struct rank_state {
    service_order order;
    std::vector<ready_segment> ready = {};
    /// Segments that became ready, by microbatch and phase.
    std::vector<std::array<uint64_t, 2>> segments = {};
    uint64_t arrivals = 0;
    bool busy = false;
    /// By execution: the calls at which it returns the token.
    std::vector<std::vector<size_t>> stops = {};
  };

  /// A segment that may start when requests have been answered.
  struct blocked_segment {
    place where;
    std::vector<request_id> requests;
  };

  [[noreturn]] static void fail(const char* why) {
    throw error{error_code::internal,
                std::string{"the records of a step do not fit: "} + why};
  }

  const recorded_execution& execution_at(const place& where) const {
    return records_[where.rank].executions[where.execution];
  }

  const std::vector<size_t>& stops_at(const place& where) const {
    return ranks_[where.rank].stops[where.execution];
  }

  void find_stops(size_t rank, uint32_t execution) {
    auto& calls = records_[rank].executions[execution].calls;
    auto& stops = ranks_[rank].stops.emplace_back();
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i].kind == call_kind::promise)
        continue;
      stops.push_back(i);
      callers_[{pipeline_[rank], calls[i].number}] = {
        rank, execution, static_cast<uint32_t>(stops.size())};
    }
  }

  /// @returns the call at which the segment before `where` ended.
  const recorded_call& stop_before(const place& where) const {
    return execution_at(where).calls[stops_at(where)[where.segment - 1]];
  }

  // -- segments become ready --------------------------------------------------

  void push(const place& where) {
    auto& rank = ranks_[where.rank];
    auto& execution = execution_at(where);
    auto what = where.segment == 0 ? execution.what : stop_before(where).what;
    auto& phases = rank.segments[execution.microbatch.value];
    auto& segment = phases[static_cast<size_t>(what)];
    rank.ready.push_back(
      {{what, execution.microbatch, ++rank.arrivals, segment++}, where});
  }

  bool are_answered(const std::vector<request_id>& requests) const {
    return std::ranges::all_of(
      requests, [this](auto& id) { return answered_.contains(id); });
  }

  /// Lets `where` start when `requests` have been answered.
  void push_after(const place& where, std::vector<request_id> requests) {
    if (are_answered(requests))
      push(where);
    else
      blocked_.push_back({where, std::move(requests)});
  }

  void answer(request_id id) {
    answered_.insert(id);
    for (auto& blocked : std::exchange(blocked_, {}))
      push_after(blocked.where, std::move(blocked.requests));
  }

  /// Delivers the request that `call`, of rank `from`, sends to its owner.
  void send(rank_id from, const recorded_call& call) {
    auto owner = std::find(pipeline_.begin(), pipeline_.end(), call.owner);
    if (owner == pipeline_.end())
      fail("a request goes to another pipeline");
    auto rank = static_cast<size_t>(owner - pipeline_.begin());
    auto index = records_[rank].by_id.find({from, call.number});
    if (index == records_[rank].by_id.end())
      fail("a request did not arrive");
    auto& execution = records_[rank].executions[index->second];
    std::vector<request_id> needs;
    if (execution.after != 0)
      needs.push_back(without_step({from, execution.after}));
    for (auto object : execution.needs)
      needs.push_back(asked_for(object));
    push_after({rank, index->second, 0}, std::move(needs));
  }

  // -- ranks serve them -------------------------------------------------------

  /// Starts the first segment in the order of each free rank. Segments that
  /// only pass something on precede all work, as others may wait for them.
  void serve() {
    auto passed = true;
    while (std::exchange(passed, false))
      for (size_t rank = 0; rank < ranks_.size(); ++rank)
        while (auto segment = take_first(rank, true)) {
          end_segment(segment->where);
          passed = true;
        }
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      if (auto segment = take_first(rank, false)) {
        ranks_[rank].busy = true;
        running_.push({now_ + duration(*segment), ++started_, segment->where});
      }
  }

  /// @returns the next segment of a rank among those that take no time
  ///          (`passes`), or among those that do
  std::optional<ready_segment> take_first(size_t rank, bool passes) {
    auto& state = ranks_[rank];
    if (state.busy)
      return std::nullopt;
    auto& ready = state.ready;
    auto first = ready.end();
    for (auto i = ready.begin(); i != ready.end(); ++i)
      if ((duration(*i) == 0) == passes
          && (first == ready.end() || state.order(i->key, first->key)))
        first = i;
    if (first == ready.end())
      return std::nullopt;
    auto result = *first;
    ready.erase(first);
    note_served(result.where);
    return result;
  }

  void note_served(const place& where) {
    result_.served[where.rank].push_back({where.execution, where.segment});
  }

  /// Backward phases pass through the work of forward phases in reverse and
  /// take twice as long. If the program lacks a segment, such as a second call
  /// of a module, its work is done when it begins; later it passes results on.
  uint64_t duration(const ready_segment& x) const {
    auto& segments = work_[x.where.rank];
    auto backward = x.key.what == phase::backward;
    auto work = x.where.segment == 0 ? work_per_device : 0;
    if (auto i = x.key.segment; i < segments.size())
      work = segments[backward ? segments.size() - 1 - i : i];
    return backward ? 2 * work : work;
  }

  void end_segments_of_now() {
    do {
      auto where = running_.top().where;
      running_.pop();
      ranks_[where.rank].busy = false;
      end_segment(where);
    } while (!running_.empty() && running_.top().time == now_);
  }

  void end_segment(place where) {
    auto& execution = execution_at(where);
    auto next_call = where.segment == 0
                       ? 0
                       : stops_at(where)[where.segment - 1] + 1;
    for (auto i = next_call; i < execution.calls.size(); ++i) {
      auto& call = execution.calls[i];
      if (call.kind == call_kind::promise) {
        send(pipeline_[where.rank], call);
        continue;
      }
      if (!goes_on(where, call))
        return stop(where.next(), call);
      where = where.next();
      note_served(where);
    }
    end_execution(execution);
  }

  void end_execution(const recorded_execution& execution) {
    if (is_root_request(execution.id)) {
      policy_.ended(execution.microbatch);
      return end_forward(execution.microbatch, false);
    }
    answer(execution.id); // its caller may have waited, and name its results
    if (execution.promised)
      return;
    auto caller = callers_.find(execution.id);
    if (caller == callers_.end())
      fail("an answer has nobody to go to");
    push(caller->second);
  }

  std::vector<request_id> waited_for(const place& where,
                                     const recorded_call& call) const {
    std::vector<request_id> result;
    for (auto number : call.until)
      result.push_back({pipeline_[where.rank], number});
    return result;
  }

  /// If what an execution waits for is there, it takes the token again at once,
  /// and both segments do the work of one: a free order would not wait.
  bool goes_on(const place& where, const recorded_call& call) const {
    return call.kind == call_kind::wait
           && are_answered(waited_for(where, call));
  }

  /// @param next the segment that follows `call`
  void stop(const place& next, const recorded_call& call) {
    switch (call.kind) {
      case call_kind::grant:
        return end_forward(execution_at(next).microbatch, true);
      case call_kind::wait:
        return push_after(next, waited_for(next, call));
      default:
        send(pipeline_[next.rank], call);
    }
  }

  void check_all_served() const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      size_t expected = 0;
      for (auto& stops : ranks_[rank].stops)
        expected += stops.size() + 1;
      if (result_.served[rank].size() != expected)
        fail("something is never reached");
    }
  }

  // -- the schedule starts microbatches ---------------------------------------

  void end_forward(microbatch_id microbatch, bool grant) {
    if (grant)
      policy_.forward_done(microbatch);
    if (in_forward_ == microbatch)
      in_forward_.reset();
    ask_policy();
  }

  void ask_policy() {
    while (auto next = policy_.next())
      due_.push_back(*next);
    for (auto i = due_.begin(); i != due_.end();) {
      if (forward_alone_ && i->what == phase::forward && in_forward_) {
        ++i;
        continue;
      }
      start(*i);
      i = due_.erase(i);
    }
  }

  void start(const task& due) {
    result_.admission.push_back(due);
    auto root = records_[0].by_id.find(
      {pipeline_[0], root_request_number(step_id{}, due.microbatch)});
    if (root == records_[0].by_id.end())
      fail("a microbatch is missing");
    place where{0, root->second, 0};
    if (due.what == phase::forward)
      in_forward_ = due.microbatch;
    else
      where.segment = segment_after_grant(where);
    push(where);
  }

  uint32_t segment_after_grant(const place& where) const {
    auto& calls = execution_at(where).calls;
    auto& stops = stops_at(where);
    auto grant = std::ranges::find_if(stops, [&calls](auto call) {
      return calls[call].kind == call_kind::grant;
    });
    if (grant == stops.end())
      fail("a backward phase is missing");
    return static_cast<uint32_t>(grant - stops.begin()) + 1;
  }

  const std::vector<step_record>& records_;
  const std::vector<rank_id>& pipeline_;
  schedule& policy_;
  bool forward_alone_;
  std::vector<std::vector<uint64_t>> work_;
  std::vector<rank_state> ranks_;
  uint64_t now_ = 0;
  uint64_t started_ = 0;                     // segments that take time
  std::priority_queue<segment_end> running_; // one per busy rank
  std::map<request_id, place> callers_;      // resumed by an answer
  std::vector<blocked_segment> blocked_;
  std::set<request_id> answered_;
  std::vector<task> due_;
  std::optional<microbatch_id> in_forward_;
  pipeline_order result_;
};

} // namespace

pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy, const order_rules& rules) {
  return step_simulation{ranks, pipeline, policy, rules}.run();
}

// -- comparing the orders of pipelines ----------------------------------------

namespace {

/// Segments of an execution end where it gives the token back.
uint64_t segments_of(const recorded_execution& execution) {
  auto stops = std::ranges::count_if(execution.calls, [](auto& call) {
    return call.kind != call_kind::promise;
  });
  return static_cast<uint64_t>(stops) + 1;
}

/// Tells whether `served` has each segment of a rank once.
bool serves_all(const std::vector<served_segment>& served,
                const step_record& rank) {
  uint64_t expected = 0;
  for (auto& execution : rank.executions)
    expected += segments_of(execution);
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (auto& [execution, segment] : served)
    if (execution >= rank.executions.size()
        || segment >= segments_of(rank.executions[execution])
        || !seen.emplace(execution, segment).second)
      return false;
  return seen.size() == expected;
}

/// @throws error (protocol) unless `order` serves exactly what `ranks` did
void check_served(const pipeline_order& order,
                  const std::vector<step_record>& ranks, rank_id decided_by) {
  auto fits = order.served.size() == ranks.size();
  for (size_t i = 0; fits && i < ranks.size(); ++i)
    fits = serves_all(order.served[i], ranks[i]);
  if (!fits)
    throw error{failure{error_code::protocol,
                        decided_by,
                        {},
                        "malformed order: it does not serve each segment of "
                        "the recorded step once"}};
}

/// Where a request comes from, and which of the requests of a step it is.
class request_ordinals {
public:
  using origin = std::pair<uint64_t, uint64_t>; // pp_rank, number

  request_ordinals(const std::vector<step_record>& ranks,
                   const std::vector<rank_id>& pipeline)
    : pipeline_(pipeline) {
    for (auto& rank : ranks)
      for (auto& execution : rank.executions)
        ordinals_.emplace(origin_of(execution.id), 0);
    uint64_t count = 0;
    for (auto& [key, ordinal] : ordinals_)
      ordinal = count++;
  }

  origin origin_of(request_id id) const {
    auto pp_rank = std::ranges::find(pipeline_, id.origin) - pipeline_.begin();
    return {static_cast<uint64_t>(pp_rank), id.number};
  }

  uint64_t of(request_id id) const {
    return ordinals_.at(origin_of(id));
  }

private:
  const std::vector<rank_id>& pipeline_;
  std::map<origin, uint64_t> ordinals_;
};

} // namespace

std::vector<uint64_t> likeness_of(const pipeline_order& order,
                                  const std::vector<step_record>& ranks,
                                  const std::vector<rank_id>& pipeline) {
  check_served(order, ranks, pipeline.front());
  request_ordinals requests{ranks, pipeline};
  std::vector<uint64_t> result;
  for (size_t i = 0; i < order.served.size(); ++i) {
    result.push_back(order.served[i].size());
    for (auto& served : order.served[i]) {
      auto& execution = ranks[i].executions[served.execution];
      result.push_back(requests.origin_of(execution.id).first);
      result.push_back(requests.of(execution.id));
      result.push_back(execution.microbatch.value);
      result.push_back(static_cast<uint64_t>(execution.what));
      result.push_back(served.segment);
    }
  }
  for (auto& task : order.admission) {
    result.push_back(task.microbatch.value);
    result.push_back(static_cast<uint64_t>(task.what));
  }
  return result;
}

} // namespace smp
