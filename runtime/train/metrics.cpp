#include "runtime/train/metrics.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/files/errno_text.hpp"
#include "transport/error.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>

namespace smp {

namespace {

[[noreturn]] void fail(const std::string& path) {
  throw error{error_code::config, path + ": " + errno_text(errno)};
}

/// Has the same length for each held-out loss: blanks before the last brace.
std::string line_of(const step_metrics& x) {
  constexpr size_t longest = 24; // -2.2250738585072014e-308
  auto result = to_json(x);
  if (x.held_out_loss)
    result.insert(result.size() - 1,
                  longest - nlohmann::json(*x.held_out_loss).dump().size(),
                  ' ');
  return result + '\n';
}

} // namespace

std::string to_json(const step_metrics& x) {
  nlohmann::ordered_json result;
  result["step"] = x.step;
  result["loss"] = x.loss;
  result["lr"] = x.lr;
  result["grad_norm"] = x.grad_norm;
  result["step_seconds"] = x.step_seconds;
  result["samples_per_second"] = x.samples_per_second;
  result["bubble_ratio"] = x.bubble_ratio;
  result["requests"] = x.requests;
  result["bytes_sent"] = x.bytes_sent;
  if (x.offloaded_bytes) {
    result["offloaded_bytes"] = *x.offloaded_bytes;
    result["offload_wait_seconds"] = x.offload_wait_seconds;
  }
  for (auto& y : x.devices) {
    result["device"].push_back(y.device);
    result["device_memory"].push_back(y.now);
    result["device_peak_memory"].push_back(y.peak);
    result["device_total_memory"].push_back(y.total);
  }
  if (!x.static_mode.empty())
    result["static"] = x.static_mode;
  if (!x.ran_again.empty())
    result["ran_again"] = x.ran_again;
  if (x.loss_scale != 1)
    result["loss_scale"] = x.loss_scale;
  if (!x.skipped.empty())
    result["skipped"] = x.skipped;
  if (x.checkpoint_seconds > 0)
    result["checkpoint_seconds"] = x.checkpoint_seconds;
  if (x.held_out_loss)
    result["held_out_loss"] = *x.held_out_loss;
  return json_text(result);
}

metrics_file::metrics_file(std::string path)
  : path_(std::move(path)), out_(path_, std::ios::trunc) {
  if (!out_)
    fail(path_);
}

void metrics_file::write(const step_metrics& x) {
  last_ = x;
  begin_ = out_.tellp();
  put_last();
}

void metrics_file::add_held_out_loss(double x) {
  if (!last_.held_out_loss)
    return;
  last_.held_out_loss = x;
  out_.seekp(begin_);
  put_last();
}

void metrics_file::put_last() {
  errno = 0;
  out_ << line_of(last_) << std::flush;
  if (!out_)
    fail(path_);
}

} // namespace smp
