#include "runtime/train/metrics.hpp"

#include "runtime/base/json_text.hpp"
#include "runtime/files/errno_text.hpp"
#include "runtime/files/file_io.hpp"
#include "transport/error.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <string_view>
#include <utility>

#include <unistd.h>

namespace smp {

namespace {

[[noreturn]] void fail(const std::string& path) {
  throw error{error_code::config, path + ": " + errno_text(errno)};
}

constexpr const char* held_out_key = "held_out_loss";

/// Has the same length for each held-out loss: blanks before the last brace.
std::string line_of(const nlohmann::ordered_json& x) {
  constexpr size_t longest = 24; // -2.2250738585072014e-308
  auto result = json_text(x);
  if (auto loss = x.find(held_out_key); loss != x.end())
    result.insert(result.size() - 1, longest - loss->dump().size(), ' ');
  return result + '\n';
}

/// @returns the complete lines of a file, each with its end; nothing if there
/// is no such file
std::string complete_lines(const std::string& path) {
  auto result = try_read(path);
  if (!result && errno != ENOENT)
    fail(path);
  if (!result)
    return {};
  result->resize(result->rfind('\n') + 1); // 0 without one
  return std::move(*result);
}

/// @returns where the last of some complete lines begins
size_t begin_of_last(std::string_view lines) {
  return lines.size() < 2 ? 0 : lines.rfind('\n', lines.size() - 2) + 1;
}

/// @returns the steps that a line says are done; nothing if it says nothing
std::optional<uint64_t> steps_done(const nlohmann::ordered_json& x) {
  for (auto key : {"from_step", "step"})
    if (x.is_object())
      if (auto y = x.find(key); y != x.end() && y->is_number_unsigned())
        return y->get<uint64_t>();
  return std::nullopt;
}

nlohmann::ordered_json parse(std::string_view line) {
  return nlohmann::ordered_json::parse(line, nullptr, false);
}

} // namespace

namespace {

nlohmann::ordered_json object_of(const step_metrics& x) {
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
    result["device"].push_back(y.name);
    result["device_memory"].push_back(y.memory);
    result["device_peak_memory"].push_back(y.peak_memory);
    result["device_total_memory"].push_back(y.total_memory);
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
    result[held_out_key] = *x.held_out_loss;
  return result;
}

} // namespace

std::string to_json(const step_metrics& x) {
  return json_text(object_of(x));
}

// -- a run that is started again ----------------------------------------------

void add_restart(const std::string& path, const restart_note& x) {
  nlohmann::ordered_json note;
  note["restart"] = x.number;
  note["at_step"] = x.at_step;
  note["from_step"] = x.from_step;
  note["cause"] = x.cause;
  // In its place: somebody may follow the file.
  const auto size = complete_lines(path).size();
  std::ofstream out{path, std::ios::app};
  if (!out || ::truncate(path.c_str(), static_cast<off_t>(size)) != 0)
    fail(path);
  out << json_text(note) << '\n' << std::flush;
  if (!out)
    fail(path);
}

std::optional<uint64_t> steps_done_in(const std::string& path) {
  auto lines = complete_lines(path);
  return steps_done(
    parse(std::string_view{lines}.substr(begin_of_last(lines))));
}

// -- writing ------------------------------------------------------------------

metrics_file::metrics_file(std::string path, bool goes_on)
  : path_(std::move(path)),
    out_(path_, goes_on ? std::ios::in | std::ios::out | std::ios::ate
                        : std::ios::out | std::ios::trunc) {
  if (!out_)
    fail(path_);
  if (goes_on)
    find_open_line();
}

void metrics_file::find_open_line() {
  const auto text = complete_lines(path_);
  std::string_view lines{text};
  auto from = steps_done(parse(lines.substr(begin_of_last(lines))));
  while (from && !lines.empty()) {
    auto begin = begin_of_last(lines);
    auto line = parse(lines.substr(begin));
    if (line.is_object() && line.contains("step") && line["step"] == *from) {
      if (line.contains(held_out_key) && line[held_out_key].is_null()) {
        open_line_ = lines.substr(begin);
        begin_ = static_cast<std::streamoff>(begin);
      }
      return;
    }
    lines = lines.substr(0, begin);
  }
}

void metrics_file::write(const step_metrics& x) {
  auto line = line_of(object_of(x));
  begin_ = out_.tellp();
  put(line);
  open_line_ = x.held_out_loss ? line : std::string{};
}

void metrics_file::add_held_out_loss(double x) {
  if (open_line_.empty())
    return;
  auto line = parse(std::exchange(open_line_, {}));
  line[held_out_key] = x;
  out_.seekp(begin_);
  put(line_of(line));
  out_.seekp(0, std::ios::end);
}

void metrics_file::put(const std::string& line) {
  errno = 0;
  out_ << line << std::flush;
  if (!out_)
    fail(path_);
}

} // namespace smp
