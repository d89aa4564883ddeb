#include "partition/schedule/checker.hpp"

#include "transport/error.hpp"

#include <algorithm>
#include <map>
#include <queue>
#include <random>
#include <utility>

namespace smp {

namespace {

error refusal(const std::string& text) {
  return error{error_code::config, "the schedule is refused: " + text};
}

/// A microbatch in one phase, about to do one work.
struct item {
  ready_key key;
  size_t index; // of the work in the chain
};

class player {
public:
  player(const pipeline_program& program, schedule& policy,
         const check_options& options)
    : program_(program),
      policy_(policy),
      options_(options),
      devices_(program.devices),
      segment_(program.chain.size()),
      passed_(program.chain.size()),
      held_(program.chain.size()),
      states_(options.microbatches),
      position_(options.microbatches),
      engine_(options.seed) {
    report_.busy.resize(program.devices);
    report_.peak_live.resize(program.devices);
    report_.peak_activations.resize(program.devices);
    if (options.orders.empty())
      orders_.assign(program.devices, backward_first);
    else
      orders_ = options.orders;
    count_segments();
    find_lifetimes();
  }

  schedule_report run() {
    pump();
    serve();
    while (!running_.empty() || !flying_.empty()) {
      now_ = next_time();
      do
        step();
      while (next_time() == now_);
      serve();
      // The schedule may have waited for a report of the ranks.
      while (tell()) {
        pump();
        serve();
      }
    }
    check_end();
    report_.makespan = now_;
    double sum = 0;
    for (auto x : report_.busy)
      sum += x;
    if (now_ > 0)
      report_.bubble = 1 - sum / (now_ * static_cast<double>(program_.devices));
    return std::move(report_);
  }

private:
  using state = microbatch_state;

  struct event {
    double time;
    uint64_t number; // breaks ties
    item what;

    bool operator<(const event& x) const { // the top is the earliest
      return time != x.time ? time > x.time : number > x.number;
    }
  };

  struct later {
    const service_order& order;
    bool operator()(const item& x, const item& y) const {
      return order(y.key, x.key);
    }
  };

  struct device_state {
    bool busy = false;
    bool touched = false;
    uint64_t arrivals = 0;
    uint64_t segments = 0;   // of one phase of a microbatch
    std::vector<item> ready; // a heap
    uint64_t live = 0;
    double activations = 0;
    rank_level told;
  };

  // -- events -----------------------------------------------------------------

  bool next_is_arrival() const {
    return running_.empty()
           || (!flying_.empty() && running_.top() < flying_.top());
  }

  double next_time() const {
    auto result = std::numeric_limits<double>::infinity();
    if (!running_.empty())
      result = running_.top().time;
    return flying_.empty() ? result : std::min(result, flying_.top().time);
  }

  void step() {
    if (next_is_arrival()) {
      auto x = flying_.top().what;
      flying_.pop();
      arrive(x);
    } else {
      auto x = running_.top().what;
      running_.pop();
      complete(x);
    }
  }

  // -- schedule ---------------------------------------------------------------

  void pump() {
    while (auto x = policy_.next()) {
      auto i = x->microbatch.value;
      if (i >= options_.microbatches)
        throw refusal("it starts " + to_string(*x) + " in a step of "
                      + std::to_string(options_.microbatches)
                      + " microbatches");
      if (x->what == phase::forward)
        start(*x);
      else
        turn(*x);
    }
  }

  void start(const task& x) {
    auto& st = states_[x.microbatch.value];
    if (st != state::not_started)
      throw refusal("it starts " + to_string(x) + " twice");
    st = state::forward;
    position_[x.microbatch.value] = started_++;
    report_.peak_active = std::max(report_.peak_active, ++alive_);
    if (alive_ > options_.active)
      throw refusal("with " + to_string(x) + " it keeps "
                    + std::to_string(alive_)
                    + " microbatches alive, smp.active_microbatches = "
                    + std::to_string(options_.active));
    arrive(item{{phase::forward, x.microbatch}, 0});
  }

  void turn(const task& x) {
    auto& st = states_[x.microbatch.value];
    if (st == state::backward || st == state::ended)
      throw refusal("it starts " + to_string(x) + " twice");
    if (st != state::ready_for_backward)
      throw refusal("it starts " + to_string(x)
                    + " before the forward phase is done");
    st = state::backward;
    arrive(item{{phase::backward, x.microbatch}, program_.chain.size() - 1});
  }

  void check_end() const {
    for (uint64_t i = 0; i < states_.size(); ++i) {
      auto what = task{microbatch_id{i}, states_[i] == state::ready_for_backward
                                           ? phase::backward
                                           : phase::forward};
      if (states_[i] != state::ended)
        throw refusal("it never starts " + to_string(what)
                      + " although nothing is in flight");
    }
  }

  // -- works ------------------------------------------------------------------

  void send(const item& x) {
    flying_.push({now_ + program_.hop_seconds * delay(), number_++, x});
  }

  /// How long this hop takes, in hops.
  double delay() {
    constexpr double steps = 1 << 20;
    return options_.seed == 0
             ? 1
             : 0.5 + static_cast<double>(engine_() >> 44) / steps;
  }

  void arrive(item x) {
    auto& next = program_.chain[x.index];
    if (x.key.what == phase::forward && next.ordered) {
      auto position = position_[x.key.microbatch.value];
      if (position != passed_[x.index]) {
        held_[x.index].emplace(position, x);
        return;
      }
    }
    auto& device = touch(next.device);
    x.key.arrival = device.arrivals++;
    x.key.segment = x.key.what == phase::forward
                      ? segment_[x.index]
                      : device.segments - 1 - segment_[x.index];
    device.ready.push_back(x);
    std::push_heap(device.ready.begin(), device.ready.end(),
                   later{orders_[next.device]});
  }

  device_state& touch(uint32_t device) {
    auto& result = devices_[device];
    if (!std::exchange(result.touched, true))
      touched_.push_back(device);
    return result;
  }

  /// Gives each free token to the first item in service order.
  void serve() {
    for (auto i : std::exchange(touched_, {})) {
      auto& device = devices_[i];
      device.touched = false;
      changed_.push_back(i);
      if (device.busy || device.ready.empty())
        continue;
      std::pop_heap(device.ready.begin(), device.ready.end(),
                    later{orders_[i]});
      auto x = device.ready.back();
      device.ready.pop_back();
      device.busy = true;
      auto& what = program_.chain[x.index];
      auto forward = x.key.what == phase::forward;
      auto seconds = forward ? what.forward : what.backward;
      if (forward)
        keep(x.index);
      report_.busy[i] += seconds;
      if (options_.timeline && seconds > 0)
        report_.timeline.push_back(
          {i, {x.key.microbatch, x.key.what}, now_, now_ + seconds});
      running_.push({now_ + seconds, number_++, x});
    }
  }

  void complete(const item& x) {
    auto& done = program_.chain[x.index];
    touch(done.device).busy = false;
    if (x.key.what == phase::forward) {
      if (done.ordered)
        release(x.index);
      if (x.index + 1 < program_.chain.size())
        return send({x.key, x.index + 1});
      states_[x.key.microbatch.value] = state::ready_for_backward;
      policy_.forward_done(x.key.microbatch);
    } else {
      drop(x.index);
      if (x.index > 0)
        return send({x.key, x.index - 1});
      states_[x.key.microbatch.value] = state::ended;
      --alive_;
      policy_.ended(x.key.microbatch);
    }
    pump();
  }

  void release(size_t index) {
    auto next = held_[index].extract(++passed_[index]);
    if (next)
      arrive(next.mapped());
  }

  /// Tells the schedule what the ranks do now. @returns false if nothing is new
  bool tell() {
    constexpr double bytes_per_element = 4;
    bool any = false;
    for (auto i : std::exchange(changed_, {})) {
      auto& x = devices_[i];
      rank_level level{
        i, x.busy, static_cast<uint64_t>(bytes_per_element * x.activations)};
      if (level == x.told)
        continue;
      x.told = level;
      policy_.rank_changed(level);
      any = true;
    }
    return any;
  }

  // -- activations ------------------------------------------------------------

  void count_segments() {
    for (size_t i = 0; i < program_.chain.size(); ++i)
      segment_[i] = devices_[program_.chain[i].device].segments++;
  }

  /// Finds the works where a microbatch starts and stops keeping something on a
  /// device: the first one that keeps anything, as backward reaches it last.
  void find_lifetimes() {
    first_.resize(program_.chain.size());
    std::vector<bool> seen(program_.devices);
    for (size_t i = 0; i < program_.chain.size(); ++i) {
      auto& x = program_.chain[i];
      if ((x.forward > 0 || x.activations > 0) && !seen[x.device])
        seen[x.device] = first_[i] = true;
    }
  }

  void keep(size_t index) {
    auto device = program_.chain[index].device;
    auto& x = devices_[device];
    x.live += first_[index];
    x.activations += program_.chain[index].activations;
    auto& live = report_.peak_live[device];
    auto& activations = report_.peak_activations[device];
    live = std::max(live, x.live);
    activations = std::max(activations, x.activations);
  }

  void drop(size_t index) {
    auto& x = devices_[program_.chain[index].device];
    x.live -= first_[index];
    x.activations -= program_.chain[index].activations;
  }

  const pipeline_program& program_;
  schedule& policy_;
  const check_options& options_;
  schedule_report report_;
  double now_ = 0;
  uint64_t number_ = 0;
  std::priority_queue<event> running_; // one per busy device
  std::priority_queue<event> flying_;
  std::vector<device_state> devices_;
  std::vector<uint32_t> touched_;
  std::vector<uint32_t> changed_; // since the schedule was told
  std::vector<service_order> orders_;
  std::vector<uint64_t> segment_; // per work: of those of its device
  std::vector<bool> first_;
  // Per ordered work: how many passed, and which wait for their turn.
  std::vector<uint64_t> passed_;
  std::vector<std::map<uint64_t, item>> held_;
  std::vector<state> states_;
  std::vector<uint64_t> position_; // in the order of starts
  uint64_t started_ = 0;
  uint64_t alive_ = 0;
  std::mt19937_64 engine_;
};

} // namespace

schedule_report check_schedule(const pipeline_program& program, schedule& x,
                               const check_options& options) {
  if (program.chain.empty())
    throw error{error_code::internal, "a program without work"};
  return player{program, x, options}.run();
}

} // namespace smp
