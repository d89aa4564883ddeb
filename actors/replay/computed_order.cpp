#include "actors/replay/computed_order.hpp"

#include "actors/protocol/result_name.hpp"

#include <algorithm>
#include <array>
#include <set>
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

step_record record_of(const step_flow& x) {
  step_record result;
  result.microbatches = x.microbatches;
  for (auto& y : x.executions) {
    auto index = static_cast<uint32_t>(result.executions.size());
    if (y.microbatch.value >= x.microbatches
        || !result.by_id.emplace(y.id, index).second)
      throw error{error_code::protocol,
                  "malformed flow: an execution is there "
                  "twice, or of no microbatch"};
    auto& z = result.executions.emplace_back();
    z.id = y.id;
    z.microbatch = y.microbatch;
    z.what = y.what;
    z.promised = y.promised;
    z.after = y.after;
    z.needs = y.needs;
    for (auto& c : y.calls) {
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

class player {
public:
  player(const std::vector<step_record>& ranks,
         const std::vector<rank_id>& pipeline, schedule& policy,
         const std::vector<service_order>& orders, bool forward_alone)
    : records_(ranks),
      pipeline_(pipeline),
      policy_(policy),
      forward_alone_(forward_alone) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      ranks_.push_back({orders.at(i), {}, {}, 0, {}});
      ranks_[i].segments.resize(ranks[i].microbatches);
      result_.served.emplace_back();
      for (uint32_t e = 0; e < ranks[i].executions.size(); ++e)
        find_stops(i, e);
    }
  }

  pipeline_order play() {
    ask_policy();
    // All that is ready runs for one unit of time; then its ends are events.
    for (;;) {
      std::vector<place> running;
      for (size_t i = 0; i < ranks_.size(); ++i)
        if (auto x = serve(i))
          running.push_back(*x);
      if (running.empty())
        break;
      for (auto& x : running)
        end_segment(x);
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

  struct rank_state {
    service_order order;
    std::vector<ready_segment> ready;
    std::vector<std::array<uint64_t, 2>> segments; // by microbatch, phase
    uint64_t arrivals = 0;
    /// By execution: its calls at which it gives the token back.
    std::vector<std::vector<size_t>> stops;
  };

  /// May start when promises have been answered.
  struct blocked_segment {
    place where;
    std::vector<request_id> promises;
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

  /// Lets `x` start when `promises` have been answered.
  void push_after(const place& x, std::vector<request_id> promises) {
    std::erase_if(promises, [this](auto& y) { return over_.contains(y); });
    if (promises.empty())
      push(x);
    else
      blocked_.push_back({x, std::move(promises)});
  }

  void end_promise(request_id x) {
    over_.insert(x);
    for (auto& y : std::exchange(blocked_, {}))
      push_after(y.where, std::move(y.promises));
  }

  /// The owner of `x`, which `from` calls, gets the request.
  void send(rank_id from, const recorded_call& x) {
    auto owner = std::find(pipeline_.begin(), pipeline_.end(), x.owner);
    if (owner == pipeline_.end())
      fail("a request goes to another pipeline");
    auto rank = static_cast<size_t>(owner - pipeline_.begin());
    auto i = records_[rank].by_id.find({from, x.number});
    if (i == records_[rank].by_id.end())
      fail("a request did not arrive");
    auto& e = records_[rank].executions[i->second];
    std::vector<request_id> promises;
    if (e.after != 0)
      promises.push_back(without_step({from, e.after}));
    for (auto y : e.needs)
      promises.push_back(asked_for(y));
    push_after({rank, i->second, 0}, std::move(promises));
  }

  std::optional<place> serve(size_t i) {
    auto& rank = ranks_[i];
    if (rank.ready.empty())
      return std::nullopt;
    auto first = std::min_element(
      rank.ready.begin(), rank.ready.end(),
      [&](auto& a, auto& b) { return rank.order(a.key, b.key); });
    auto result = first->where;
    rank.ready.erase(first);
    result_.served[i].push_back({result.execution, result.segment});
    return result;
  }

  void end_segment(const place& x) {
    auto& e = at(x);
    auto& stops = ranks_[x.rank].stops[x.execution];
    auto c = x.segment == 0 ? 0 : stops[x.segment - 1] + 1;
    for (; c < e.calls.size() && e.calls[c].kind == call_kind::promise; ++c)
      send(pipeline_[x.rank], e.calls[c]);
    if (c < e.calls.size())
      return stop({x.rank, x.execution, x.segment + 1}, e.calls[c]);
    if (is_root_request(e.id)) {
      policy_.ended(e.microbatch);
      return end_forward(e.microbatch, false);
    }
    if (e.promised)
      return end_promise(e.id);
    auto caller = callers_.find(e.id);
    if (caller == callers_.end())
      fail("an answer has nobody to go to");
    push(caller->second);
  }

  /// @param next goes on after `x`
  void stop(const place& next, const recorded_call& x) {
    std::vector<request_id> promises;
    switch (x.kind) {
      case call_kind::grant:
        return end_forward(at(next).microbatch, true);
      case call_kind::wait:
        for (auto y : x.until)
          promises.push_back({pipeline_[next.rank], y});
        return push_after(next, std::move(promises));
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
    auto segment = static_cast<uint32_t>(grant - stops.begin()) + 1;
    push({0, root->second, segment});
  }

  const std::vector<step_record>& records_;
  const std::vector<rank_id>& pipeline_;
  schedule& policy_;
  bool forward_alone_;
  std::vector<rank_state> ranks_;
  std::map<request_id, place> callers_; // what an answer lets go on
  std::vector<blocked_segment> blocked_;
  std::set<request_id> over_; // promises that were answered
  std::vector<task> due_;
  std::optional<microbatch_id> in_forward_;
  pipeline_order result_;
};

} // namespace

pipeline_order compute_order(const std::vector<step_record>& ranks,
                             const std::vector<rank_id>& pipeline,
                             schedule& policy,
                             const std::vector<service_order>& orders,
                             bool forward_alone) {
  return player{ranks, pipeline, policy, orders, forward_alone}.play();
}

} // namespace smp
