#include "actors/replay/computed_order.hpp"

#include "actors/protocol/result_name.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

namespace smp {

// -- flows between ranks ------------------------------------------------------

step_flow flow_of(const step_record& x, bool ordered, bool learnt) {
  step_flow result;
  result.microbatches = x.microbatches;
  result.ordered = ordered;
  result.learnt = learnt;
  for (auto& y : x.executions) {
    auto& z = result.executions.emplace_back();
    z.id = y.id;
    z.microbatch = y.microbatch;
    z.what = y.what;
    z.promised = y.promised;
    z.after = y.after;
    z.needs = y.needs;
    for (auto& c : y.calls)
      z.calls.push_back({c.kind, c.number, c.owner, c.what, c.until});
  }
  return result;
}

step_record record_of(const step_flow& x, rank_id from, uint64_t microbatches) {
  auto refuse = [from](const std::string& why) {
    throw error{
      failure{error_code::protocol, from, {}, "malformed flow: " + why}};
  };
  if (x.microbatches != microbatches)
    refuse(std::to_string(x.microbatches) + " microbatches in a step of "
           + std::to_string(microbatches));
  step_record result;
  result.microbatches = x.microbatches;
  std::set<uint32_t> numbers;
  for (auto& y : x.executions) {
    auto index = static_cast<uint32_t>(result.executions.size());
    if (y.microbatch.value >= x.microbatches
        || !result.by_id.emplace(y.id, index).second)
      refuse("an execution is there twice, or of no microbatch");
    auto& z = result.executions.emplace_back();
    z.id = y.id;
    z.microbatch = y.microbatch;
    z.what = y.what;
    z.promised = y.promised;
    z.after = y.after;
    z.needs = y.needs;
    for (auto& c : y.calls) {
      // Otherwise ranks could call each other forever.
      if (!numbers.insert(c.number).second)
        refuse("two calls have the number " + std::to_string(c.number));
      if (c.kind == call_kind::grant && !is_root_request(y.id))
        refuse("an execution that is not a step body waits for a grant");
      auto& to = z.calls.emplace_back();
      to.until = c.until;
      to.kind = c.kind;
      to.number = c.number;
      to.owner = c.owner;
      to.what = c.what;
    }
  }
  return result;
}

// -- playing a flow -----------------------------------------------------------

namespace {

/// Forward work of a device per microbatch. Most numbers of chunks divide it,
/// so that equal work takes equally long on all devices.
constexpr uint64_t unit_of_work = 720720;

/// The work of each segment in a program, by device: its share of one unit per
/// device and microbatch, as stages are meant to be balanced. Measured times
/// are not used, as they differ from run to run.
std::vector<std::vector<uint64_t>> shares_of(const pipeline_program& x,
                                             size_t devices) {
  std::vector<std::vector<uint64_t>> result(devices);
  for (auto& y : x.chain)
    result.at(y.device).push_back(y.forward > 0);
  for (auto& xs : result)
    if (auto n = std::accumulate(xs.begin(), xs.end(), uint64_t{0}); n > 0)
      for (auto& y : xs)
        y *= unit_of_work / n;
  return result;
}

class player {
public:
  player(const std::vector<step_record>& ranks,
         const std::vector<rank_id>& pipeline, schedule& policy,
         const order_rules& rules)
    : records_(ranks),
      pipeline_(pipeline),
      policy_(policy),
      forward_alone_(rules.forward_alone),
      shares_(shares_of(rules.program, ranks.size())) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks_.push_back({rules.service.at(i), {}, {}, 0, false, {}});
      ranks_[i].segments.resize(ranks[i].microbatches);
      result_.served.emplace_back();
      for (uint32_t e = 0; e < ranks[i].executions.size(); ++e)
        find_stops(i, e);
    }
  }

  pipeline_order play() {
    ask_policy();
    serve();
    while (!running_.empty()) {
      now_ = running_.top().time;
      do {
        auto x = running_.top().where;
        running_.pop();
        ranks_[x.rank].busy = false;
        end_segment(x);
      } while (!running_.empty() && running_.top().time == now_);
      serve();
    }
    for (size_t i = 0; i < ranks_.size(); ++i) {
      size_t expected = 0;
      for (auto& x : ranks_[i].stops)
        expected += x.size() + 1;
      if (result_.served[i].size() != expected)
        fail("something is never reached");
    }
    return std::move(result_);
  }

private:
  /// A segment of an execution on a rank.
  struct place {
    size_t rank = 0;
    uint32_t execution = 0;
    uint32_t segment = 0;
  };

  struct ready_segment {
    ready_key key;
    place where;
  };

  /// When a segment ends.
  struct event {
    uint64_t time;
    uint64_t number; // breaks ties
    place where;

    bool operator<(const event& x) const { // the top is the earliest
      return std::tie(time, number) > std::tie(x.time, x.number);
    }
  };

  struct rank_state {
    service_order order;
    std::vector<ready_segment> ready;
    std::vector<std::array<uint64_t, 2>> segments; // by microbatch, phase
    uint64_t arrivals = 0;
    bool busy = false;
    /// By execution: the calls at which it returns the token.
    std::vector<std::vector<size_t>> stops;
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

  const recorded_execution& at(const place& x) const {
    return records_[x.rank].executions[x.execution];
  }

  void find_stops(size_t rank, uint32_t execution) {
    auto& calls = records_[rank].executions[execution].calls;
    auto& stops = ranks_[rank].stops.emplace_back();
    for (size_t c = 0; c < calls.size(); ++c) {
      if (calls[c].kind == call_kind::promise)
        continue;
      stops.push_back(c);
      callers_[{pipeline_[rank], calls[c].number}] = {
        rank, execution, static_cast<uint32_t>(stops.size())};
    }
  }

  /// @returns the call at which the segment before `x` ended.
  const recorded_call& stop_before(const place& x) const {
    auto& stops = ranks_[x.rank].stops[x.execution];
    return at(x).calls[stops[x.segment - 1]];
  }

  void push(const place& x) {
    auto& rank = ranks_[x.rank];
    auto& e = at(x);
    auto what = x.segment == 0 ? e.what : stop_before(x).what;
    auto& segment = rank
                      .segments[e.microbatch.value][static_cast<size_t>(what)];
    rank.ready.push_back({{what, e.microbatch, ++rank.arrivals, segment++}, x});
  }

  bool all_over(const std::vector<request_id>& requests) const {
    return std::ranges::all_of(requests,
                               [this](auto& y) { return over_.contains(y); });
  }

  /// Lets `x` start when `requests` have been answered.
  void push_after(const place& x, std::vector<request_id> requests) {
    if (all_over(requests))
      push(x);
    else
      blocked_.push_back({x, std::move(requests)});
  }

  void end_request(request_id x) {
    over_.insert(x);
    for (auto& y : std::exchange(blocked_, {}))
      push_after(y.where, std::move(y.requests));
  }

  /// Delivers the request that `x`, a call of rank `from`, sends to its owner.
  void send(rank_id from, const recorded_call& x) {
    auto owner = std::find(pipeline_.begin(), pipeline_.end(), x.owner);
    if (owner == pipeline_.end())
      fail("a request goes to another pipeline");
    auto rank = static_cast<size_t>(owner - pipeline_.begin());
    auto i = records_[rank].by_id.find({from, x.number});
    if (i == records_[rank].by_id.end())
      fail("a request did not arrive");
    auto& e = records_[rank].executions[i->second];
    std::vector<request_id> needs;
    if (e.after != 0)
      needs.push_back(without_step({from, e.after}));
    for (auto y : e.needs)
      needs.push_back(asked_for(y));
    push_after({rank, i->second, 0}, std::move(needs));
  }

  /// Starts the first segment in the order of each free rank. Segments that
  /// only pass something on precede all work, as others may wait for them.
  void serve() {
    auto passed = true;
    while (std::exchange(passed, false))
      for (size_t i = 0; i < ranks_.size(); ++i)
        while (auto x = take_first(i, true)) {
          end_segment(x->where);
          passed = true;
        }
    for (size_t i = 0; i < ranks_.size(); ++i)
      if (auto x = take_first(i, false)) {
        ranks_[i].busy = true;
        running_.push({now_ + duration(*x), ++events_, x->where});
      }
  }

  /// @returns the next segment of rank `i` among those that take no time
  ///          (`passes`), or among those that do
  std::optional<ready_segment> take_first(size_t i, bool passes) {
    auto& rank = ranks_[i];
    auto first = rank.ready.end();
    if (!rank.busy)
      for (auto j = rank.ready.begin(); j != rank.ready.end(); ++j)
        if ((duration(*j) == 0) == passes
            && (first == rank.ready.end() || rank.order(j->key, first->key)))
          first = j;
    if (first == rank.ready.end())
      return std::nullopt;
    auto result = *first;
    rank.ready.erase(first);
    note_served(result.where);
    return result;
  }

  void note_served(const place& x) {
    result_.served[x.rank].push_back({x.execution, x.segment});
  }

  /// Backward phases pass through the work of forward phases in reverse and
  /// take twice as long. If the program lacks a segment, such as a second call
  /// of a module, its work is done when it begins; later it passes results on.
  uint64_t duration(const ready_segment& x) const {
    auto& shares = shares_[x.where.rank];
    auto backward = x.key.what == phase::backward;
    auto share = x.where.segment == 0 ? unit_of_work : 0;
    if (auto i = x.key.segment; i < shares.size())
      share = shares[backward ? shares.size() - 1 - i : i];
    return backward ? 2 * share : share;
  }

  void end_segment(place x) {
    auto& e = at(x);
    auto& stops = ranks_[x.rank].stops[x.execution];
    auto c = x.segment == 0 ? 0 : stops[x.segment - 1] + 1;
    for (; c < e.calls.size(); ++c) {
      if (e.calls[c].kind == call_kind::promise) {
        send(pipeline_[x.rank], e.calls[c]);
        continue;
      }
      if (!goes_on(x, e.calls[c]))
        return stop({x.rank, x.execution, x.segment + 1}, e.calls[c]);
      ++x.segment;
      note_served(x);
    }
    if (is_root_request(e.id)) {
      policy_.ended(e.microbatch);
      return end_forward(e.microbatch, false);
    }
    end_request(e.id); // its caller may have waited, and name its results
    if (e.promised)
      return;
    auto caller = callers_.find(e.id);
    if (caller == callers_.end())
      fail("an answer has nobody to go to");
    push(caller->second);
  }

  std::vector<request_id> waited_for(const place& x,
                                     const recorded_call& y) const {
    std::vector<request_id> result;
    for (auto z : y.until)
      result.push_back({pipeline_[x.rank], z});
    return result;
  }

  /// If what an execution waits for is there, it takes the token again at once,
  /// and both segments do the work of one: a free order would not wait.
  bool goes_on(const place& x, const recorded_call& y) const {
    return y.kind == call_kind::wait && all_over(waited_for(x, y));
  }

  /// @param next the segment that follows `x`
  void stop(const place& next, const recorded_call& x) {
    switch (x.kind) {
      case call_kind::grant:
        return end_forward(at(next).microbatch, true);
      case call_kind::wait:
        return push_after(next, waited_for(next, x));
      default:
        send(pipeline_[next.rank], x);
    }
  }

  void end_forward(microbatch_id x, bool grant) {
    if (grant)
      policy_.forward_done(x);
    if (in_forward_ == x)
      in_forward_.reset();
    ask_policy();
  }

  void ask_policy() {
    while (auto x = policy_.next())
      due_.push_back(*x);
    for (auto i = due_.begin(); i != due_.end();) {
      auto wait = forward_alone_ && i->what == phase::forward && in_forward_;
      if (wait) {
        ++i;
        continue;
      }
      start(*i);
      i = due_.erase(i);
    }
  }

  void start(const task& x) {
    result_.admission.push_back(x);
    auto root = records_[0].by_id.find(
      {pipeline_[0], root_request_number(step_id{}, x.microbatch)});
    if (root == records_[0].by_id.end())
      fail("a microbatch is missing");
    if (x.what == phase::forward) {
      in_forward_ = x.microbatch;
      return push({0, root->second, 0});
    }
    auto& calls = records_[0].executions[root->second].calls;
    auto& stops = ranks_[0].stops[root->second];
    auto grant = std::find_if(stops.begin(), stops.end(), [&](auto y) {
      return calls[y].kind == call_kind::grant;
    });
    if (grant == stops.end())
      fail("a backward phase is missing");
    auto segment = static_cast<uint32_t>(grant - stops.begin()) + 1;
    push({0, root->second, segment});
  }

  const std::vector<step_record>& records_;
  const std::vector<rank_id>& pipeline_;
  schedule& policy_;
  bool forward_alone_;
  std::vector<std::vector<uint64_t>> shares_;
  std::vector<rank_state> ranks_;
  uint64_t now_ = 0;
  uint64_t events_ = 0;
  std::priority_queue<event> running_;  // one per busy rank
  std::map<request_id, place> callers_; // resumed by an answer
  std::vector<blocked_segment> blocked_;
  std::set<request_id> over_; // answered requests
  std::vector<task> due_;
  std::optional<microbatch_id> in_forward_;
  pipeline_order result_;
};

} // namespace

pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy, const order_rules& rules) {
  return player{ranks, pipeline, policy, rules}.play();
}

namespace {

/// Segments of an execution end where it gives the token back.
uint64_t segments_of(const recorded_execution& x) {
  auto stops = std::ranges::count_if(
    x.calls, [](auto& y) { return y.kind != call_kind::promise; });
  return static_cast<uint64_t>(stops) + 1;
}

/// Tells whether `x` has each segment of a rank once.
bool serves_all(const std::vector<served_segment>& x, const step_record& rank) {
  uint64_t expected = 0;
  for (auto& y : rank.executions)
    expected += segments_of(y);
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (auto& y : x)
    if (y.execution >= rank.executions.size()
        || y.segment >= segments_of(rank.executions[y.execution])
        || !seen.emplace(y.execution, y.segment).second)
      return false;
  return seen.size() == expected;
}

/// @throws error (protocol) unless `x` serves exactly what `ranks` did
void check_served(const pipeline_order& x,
                  const std::vector<step_record>& ranks, rank_id decided_by) {
  auto fits = x.served.size() == ranks.size();
  for (size_t i = 0; fits && i < ranks.size(); ++i)
    fits = serves_all(x.served[i], ranks[i]);
  if (!fits)
    throw error{failure{error_code::protocol,
                        decided_by,
                        {},
                        "malformed order: it does not serve each segment of "
                        "the recorded step once"}};
}

} // namespace

std::vector<uint64_t> likeness_of(const pipeline_order& x,
                                  const std::vector<step_record>& ranks,
                                  const std::vector<rank_id>& pipeline) {
  check_served(x, ranks, pipeline.front());
  using place = std::pair<uint64_t, uint64_t>; // pp_rank, number
  auto place_of = [&pipeline](request_id y) {
    auto pp_rank = std::ranges::find(pipeline, y.origin) - pipeline.begin();
    return place{static_cast<uint64_t>(pp_rank), y.number};
  };
  std::map<place, uint64_t> requests; // their ordinals
  for (auto& rank : ranks)
    for (auto& y : rank.executions)
      requests.emplace(place_of(y.id), 0);
  uint64_t count = 0;
  for (auto& [key, ordinal] : requests)
    ordinal = count++;
  std::vector<uint64_t> result;
  for (size_t i = 0; i < x.served.size(); ++i) {
    result.push_back(x.served[i].size());
    for (auto& y : x.served[i]) {
      auto& execution = ranks[i].executions[y.execution];
      auto place = place_of(execution.id);
      for (uint64_t z :
           {place.first, requests.at(place), execution.microbatch.value,
            static_cast<uint64_t>(execution.what), uint64_t{y.segment}})
        result.push_back(z);
    }
  }
  for (auto& y : x.admission) {
    result.push_back(y.microbatch.value);
    result.push_back(static_cast<uint64_t>(y.what));
  }
  return result;
}

} // namespace smp
