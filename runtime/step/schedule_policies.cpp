#include "runtime/step/schedule_policies.hpp"

#include "actors/schedule/user_schedule.hpp"
#include "partition/schedule/promised_order.hpp"
#include "runtime/process/allocated_bytes.hpp"
#include "transport/error.hpp"

#include <algorithm>

namespace smp {

void load_schedule(session_config& x) {
  if (x.pipeline != "actor" || x.schedule_actor)
    return;
  if (x.schedule.plugin.empty())
    throw config_error(
      "smp.pipeline = \"actor\" needs smp.schedule.plugin and "
      "smp.schedule.name, or an actor in "
      "session_config::schedule_actor");
  x.schedule_actor = load_schedule_actor(x.schedule.plugin, x.schedule.name);
}

bool takes_promises(const session_config& x) {
  return x.fast_mode.value_or(true);
}

namespace {

/// A pipeline as its ranks serve it, with waiting or promised calls.
struct served_pipeline {
  served_pipeline(const pipeline_program& x, bool promised)
    : program(promised ? promised_program(x) : x), promised(promised) {
    // nop
  }

  service_place place(uint32_t device, uint64_t microbatches) const {
    return promised ? promised_place_of(program, device, microbatches)
                    : place_of(program, device, microbatches);
  }

  pipeline_program program;
  bool promised;
};

/// An awaited result arrives a moment after its rank continued with other work,
/// never at the same time: so even a hop of negligible time decides which rank
/// waits for which.
/// @returns whether there are such results
bool delay_answers(pipeline_program& x) {
  auto waits = std::ranges::any_of(x.chain, [](auto& y) { return y.waits; });
  if (!waits || x.hop_seconds > 0)
    return waits;
  double seconds = 0; // of a microbatch
  for (auto& y : x.chain)
    seconds += y.forward + y.backward;
  x.hop_seconds = 1e-4 * seconds;
  return true;
}

/// Where replies race with other work, winning or losing by a moment costs a
/// segment: so several simulations run, and the median one is shown.
uint64_t plays_of(const pipeline_program& x, uint64_t microbatches) {
  auto works = x.chain.size() * microbatches;
  return std::clamp<uint64_t>(1'000'000 / std::max<uint64_t>(works, 1), 1, 25);
}

service_order make_order(bool promised, std::string_view pipeline,
                         service_place x) {
  return promised ? make_promised_order(pipeline, std::move(x))
                  : make_service_order(pipeline, std::move(x));
}

} // namespace

schedule_policies::schedule_policies(const session_config& config,
                                     size_t partitions, actor_host& host)
  : config_(config),
    partitions_(partitions),
    host_(host),
    promised_(takes_promises(config)) {
  if (config_.pipeline == "actor")
    user_ = make_user();
}

std::shared_ptr<const user_schedule> schedule_policies::make_user() const {
  auto result = std::make_shared<user_schedule>();
  result->type = config_.schedule_actor;
  result->options = config_.schedule.options;
  result->partitions = partitions_;
  result->active = [this](uint64_t microbatches) {
    return active(microbatches);
  };
  result->memory_in_use = allocated_bytes;
  return result;
}

uint64_t schedule_policies::active(uint64_t microbatches) const {
  return effective_active_microbatches(config_, microbatches);
}

schedule_ptr schedule_policies::make(uint64_t microbatches) const {
  return make_schedule(
    config_.pipeline, microbatches, active(microbatches),
    fit_list(config_.schedule.list, config_.microbatches, microbatches));
}

schedule_ptr schedule_policies::make_timeless(uint64_t microbatches) const {
  return user_ ? rehearse(host_, *user_, microbatches) : make(microbatches);
}

service_order schedule_policies::order(uint64_t microbatches, size_t pp_rank,
                                       std::vector<uint32_t> chunk_of) const {
  return make_order(
    promised_, config_.pipeline,
    {static_cast<uint32_t>(pp_rank), static_cast<uint32_t>(partitions_),
     microbatches, static_cast<uint32_t>(config_.chunks), std::move(chunk_of)});
}

std::vector<std::vector<uint32_t>>
schedule_policies::chunks(const pipeline_program& x,
                          uint64_t microbatches) const {
  const served_pipeline served{x, promised_};
  std::vector<std::vector<uint32_t>> result;
  for (uint32_t i = 0; i < partitions_; ++i)
    result.push_back(served.place(i, microbatches).chunk_of);
  return result;
}

pipeline_program schedule_policies::served(const pipeline_program& x) const {
  return served_pipeline{x, promised_}.program;
}

schedule_report schedule_policies::play(const pipeline_program& x,
                                        uint64_t microbatches,
                                        bool timeline) const {
  served_pipeline served{x, promised_};
  auto& program = served.program;
  auto races = promised_ && delay_answers(program);
  check_options options;
  options.microbatches = microbatches;
  options.active = active(microbatches);
  options.timeline = timeline;
  for (uint32_t i = 0; i < program.devices; ++i)
    options.orders.push_back(make_order(served.promised, config_.pipeline,
                                        served.place(i, microbatches)));
  if (user_) {
    auto user = *user_;
    user.partitions = program.devices;
    return check_schedule(program, *rehearse(host_, user, microbatches),
                          options);
  }
  if (!races)
    return check_schedule(program, *make(microbatches), options);
  std::vector<schedule_report> plays;
  auto count = plays_of(program, microbatches);
  while (++options.seed <= count)
    plays.push_back(check_schedule(program, *make(microbatches), options));
  auto middle = plays.begin() + static_cast<int64_t>(count / 2);
  std::ranges::nth_element(plays, middle, {}, &schedule_report::makespan);
  return std::move(*middle);
}

} // namespace smp
