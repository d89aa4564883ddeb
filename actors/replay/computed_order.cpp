#include "actors/replay/computed_order.hpp"

#include "actors/protocol/request_number.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace smp {

// -- flows between ranks ------------------------------------------------------

step_flow flow_of(const step_record& x, bool ordered) {
  step_flow result;
  result.microbatches = x.microbatches;
  result.ordered = ordered;
  for (auto& y : x.executions) {
    auto& z = result.executions.emplace_back();
    z.id = y.id;
    z.microbatch = y.microbatch;
    z.what = y.what;
    for (auto& c : y.calls)
      z.calls.push_back({c.kind, c.number, c.owner, c.what});
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
    for (auto& c : y.calls) {
      auto& to = z.calls.emplace_back();
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
      ranks_.push_back({orders.at(i), {}, {}, 0});
      ranks_[i].segments.resize(ranks[i].microbatches);
      result_.served.emplace_back();
      for (uint32_t e = 0; e < ranks[i].executions.size(); ++e)
        for (uint32_t c = 0; c < ranks[i].executions[e].calls.size(); ++c)
          callers_[{pipeline[i], ranks[i].executions[e].calls[c].number}] = {
            i, e, c + 1};
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
      for (auto& x : records_[i].executions)
        expected += x.calls.size() + 1;
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
  };

  [[noreturn]] static void fail(const char* why) {
    throw error{error_code::internal,
                std::string{"the records of a step do not fit: "} + why};
  }

  const recorded_execution& at(const place& x) const {
    return records_[x.rank].executions[x.execution];
  }

  void push(const place& x) {
    auto& rank = ranks_[x.rank];
    auto& e = at(x);
    auto what = x.segment == 0 ? e.what : e.calls[x.segment - 1].what;
    auto& segment = rank
                      .segments[e.microbatch.value][static_cast<size_t>(what)];
    rank.ready.push_back({{what, e.microbatch, ++rank.arrivals, segment++}, x});
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
    if (x.segment < e.calls.size()) {
      auto& c = e.calls[x.segment];
      if (c.kind == call_kind::grant)
        return end_forward(e.microbatch, true);
      auto owner = std::find(pipeline_.begin(), pipeline_.end(), c.owner);
      if (owner == pipeline_.end())
        fail("a request goes to another pipeline");
      auto rank = static_cast<size_t>(owner - pipeline_.begin());
      auto i = records_[rank].by_id.find({pipeline_[x.rank], c.number});
      if (i == records_[rank].by_id.end())
        fail("a request did not arrive");
      return push({rank, i->second, 0});
    }
    if (is_root_request(e.id)) {
      policy_.ended(e.microbatch);
      return end_forward(e.microbatch, false);
    }
    auto caller = callers_.find(e.id);
    if (caller == callers_.end())
      fail("an answer has nobody to go to");
    push(caller->second);
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
    auto grant = std::find_if(calls.begin(), calls.end(), [](auto& y) {
      return y.kind == call_kind::grant;
    });
    auto segment = static_cast<uint32_t>(grant - calls.begin()) + 1;
    push({0, root->second, segment});
  }

  const std::vector<step_record>& records_;
  const std::vector<rank_id>& pipeline_;
  schedule& policy_;
  bool forward_alone_;
  std::vector<rank_state> ranks_;
  std::map<request_id, place> callers_; // what an answer lets go on
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
