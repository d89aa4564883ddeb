#include "apps/web/prometheus_text.hpp"

#include "apps/report/text_layout.hpp"
#include "apps/web/run_feed.hpp"
#include "transport/build_id.hpp"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace smp::app {

namespace {

constexpr metric_family families[] = {
  {"smp_up", "gauge", "1 if the run answers, else 0"},
  {"smp_build_info", "gauge", "1; the label says which build of smp looks"},
  {"smp_step", "gauge", "The last complete step"},
  {"smp_steps", "gauge", "Steps until the end of the run"},
  {"smp_step_seconds", "gauge", "Duration of the last step"},
  {"smp_samples_per_second", "gauge", "Throughput of the last step"},
  {"smp_loss", "gauge", "Loss of the last step"},
  {"smp_grad_norm", "gauge", "Norm of the gradient before clipping"},
  {"smp_pipeline_bubble_ratio", "gauge",
   "Share of the ranks' time in the pipeline in which they executed nothing"},
  {"smp_requests_total", "counter", "Requests of all ranks in all steps"},
  {"smp_nonfinite_total", "counter",
   "Steps whose loss or gradient was not finite"},
  {"smp_skipped_total", "counter", "Steps that updated nothing"},
  {"smp_stalled", "gauge", "1 while a reported stall lasts"},
  {"smp_last_progress_timestamp_seconds", "gauge",
   "When anything last happened on any rank"},
  {"smp_checkpoint_last_success_timestamp_seconds", "gauge",
   "When the newest complete checkpoint was written"},
  {"smp_rank_up", "gauge",
   "0 if the rank is lost, stopped, silent or blocked, else 1"},
  {"smp_rank_state", "gauge", "1 for the state that the rank is in"},
  {"smp_rank_bubble_ratio", "gauge",
   "Share of the last step in which the rank executed nothing"},
  {"smp_rank_busy_seconds_total", "counter",
   "Time in which the rank executed, since its session began"},
  {"smp_inflight_microbatches", "gauge",
   "Microbatches that have begun and not ended"},
  {"smp_queue_size", "gauge", "Requests and responses that wait to be served"},
  {"smp_request_oldest_seconds", "gauge",
   "How long the oldest request has been on the rank"},
  {"smp_comm_bytes_total", "counter", "Bytes to and from other ranks"},
  {"smp_memory_bytes", "gauge", "Resident set of the rank's process"},
  {"smp_memory_peak_bytes", "gauge", "The most of it"},
  {"smp_device_memory_bytes", "gauge",
   "What the rank's process has allocated on its device"},
  {"smp_device_memory_peak_bytes", "gauge", "The most of it"},
  {"smp_device_memory_total_bytes", "gauge", "What the device has"}};

constexpr rank_health all_states[] = {
  rank_health::well,   rank_health::joining, rank_health::blocked,
  rank_health::silent, rank_health::stopped, rank_health::lost,
  rank_health::left};

using labels = std::vector<std::pair<const char*, std::string>>;

std::string escaped_label(const std::string& x) {
  std::string result;
  for (auto c : printable(x))
    switch (c) {
      case '\\':
        result += "\\\\";
        break;
      case '"':
        result += "\\\"";
        break;
      case '\n':
        result += "\\n";
        break;
      default:
        result += c;
    }
  return result;
}

std::string value_text(double x) {
  if (std::isnan(x))
    return "NaN";
  if (std::isinf(x))
    return x > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", x);
}

/// Samples by family, as all of a family stand together.
class exposition {
public:
  explicit exposition(std::string run) : run_(std::move(run)) {
    // nop
  }

  void add(std::string_view name, double value, const labels& more = {}) {
    auto& lines = samples_[name];
    lines += fmt::format("{}{{run=\"{}\"", name, escaped_label(run_));
    for (auto& [key, text] : more)
      lines += fmt::format(",{}=\"{}\"", key, escaped_label(text));
    lines += fmt::format("}} {}\n", value_text(value));
  }

  std::string text() const {
    std::string result;
    for (auto& x : families)
      if (auto i = samples_.find(x.name); i != samples_.end())
        result += fmt::format("# HELP {} {}\n# TYPE {} {}\n{}", x.name, x.help,
                              x.name, x.type, i->second);
    return result;
  }

private:
  std::string run_;
  std::map<std::string_view, std::string> samples_;
};

/// What the PIPELINE SCHEDULER of a rank says.
std::optional<double> running_microbatches(const rank_status& x) {
  for (auto& actor : x.actors)
    if (actor.name == "PIPELINE SCHEDULER")
      for (auto& item : actor.items) {
        uint64_t result = 0;
        auto* end = item.value.data() + item.value.size();
        if (item.name == "running"
            && std::from_chars(item.value.data(), end, result).ptr == end)
          return static_cast<double>(result);
      }
  return std::nullopt;
}

double seconds_of(std::chrono::system_clock::time_point x) {
  return std::chrono::duration<double>{x.time_since_epoch()}.count();
}

double as_double(uint64_t x) {
  return static_cast<double>(x);
}

void add_device(exposition& to, const device_status& x, labels where) {
  where.emplace_back("device", x.name);
  to.add("smp_device_memory_total_bytes", as_double(x.total_memory), where);
  if (x.peak_memory == 0)
    return; // not known yet
  to.add("smp_device_memory_bytes", as_double(x.memory), where);
  to.add("smp_device_memory_peak_bytes", as_double(x.peak_memory), where);
}

void add_rank(exposition& to, const rank_entry& x) {
  labels where{{"rank", std::to_string(x.rank.value)}};
  if (x.known) {
    where.emplace_back("pp", std::to_string(x.status.pp_rank));
    where.emplace_back("tp", std::to_string(x.status.tp_rank));
    where.emplace_back("rdp", std::to_string(x.status.rdp_rank));
  }
  to.add("smp_rank_up", is_well(x.health) ? 1 : 0, where);
  for (auto state : all_states) {
    auto with_state = where;
    with_state.emplace_back("state", smp::to_string(state));
    to.add("smp_rank_state", state == x.health ? 1 : 0, with_state);
  }
  if (!x.known)
    return;
  auto& status = x.status;
  if (status.bubble)
    to.add("smp_rank_bubble_ratio", *status.bubble, where);
  to.add("smp_rank_busy_seconds_total", status.busy_seconds, where);
  if (auto running = running_microbatches(status))
    to.add("smp_inflight_microbatches", *running, where);
  to.add("smp_queue_size", as_double(status.queue), where);
  to.add("smp_request_oldest_seconds", oldest_request(x), where);
  for (auto [dir, bytes] : {std::pair{"out", status.comm.bytes_sent},
                            std::pair{"in", status.comm.bytes_received}}) {
    auto with_dir = where;
    with_dir.emplace_back("dir", dir);
    to.add("smp_comm_bytes_total", as_double(bytes), with_dir);
  }
  to.add("smp_memory_bytes", as_double(status.memory), where);
  to.add("smp_memory_peak_bytes", as_double(status.peak_memory), where);
  if (status.device)
    add_device(to, *status.device, where);
}

void add_steps(exposition& to, const metrics_input& x) {
  if (x.look.files.steps > 0)
    to.add("smp_steps", as_double(x.look.files.steps));
  if (!x.last)
    return;
  to.add("smp_step", as_double(x.last->step));
  to.add("smp_step_seconds", x.last->step_seconds);
  to.add("smp_samples_per_second", x.last->samples_per_second);
  to.add("smp_loss", x.last->loss);
  to.add("smp_grad_norm", x.last->grad_norm);
  to.add("smp_pipeline_bubble_ratio", x.last->bubble_ratio);
  to.add("smp_requests_total", as_double(x.totals.requests));
  to.add("smp_nonfinite_total", as_double(x.totals.nonfinite));
  to.add("smp_skipped_total", as_double(x.totals.skipped));
}

} // namespace

std::span<const metric_family> metric_families() {
  return families;
}

std::string prometheus_text(const metrics_input& x) {
  exposition to{x.run};
  to.add("smp_up", x.look.status ? 1 : 0);
  to.add("smp_build_info", 1, {{"build", build_id()}});
  add_steps(to, x);
  if (auto& files = x.look.files; files.checkpoint)
    to.add("smp_checkpoint_last_success_timestamp_seconds",
           std::floor(seconds_of(files.checkpoint_time)));
  if (auto& status = x.look.status) {
    to.add("smp_stalled", status->stalls.standing ? 1 : 0);
    to.add("smp_last_progress_timestamp_seconds",
           seconds_of(x.now) - status->stalls.quiet_seconds);
    for (auto& rank : status->ranks)
      add_rank(to, rank);
  }
  return to.text();
}

} // namespace smp::app
