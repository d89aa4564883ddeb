#include "apps/smp-train/rank_log.hpp"

#include "apps/report/text_layout.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/checkpoint/checkpoint.hpp"
#include "transport/error.hpp"

#include <fmt/chrono.h>

#include <cerrno>
#include <cstring>
#include <ctime>

namespace smp::app {

rank_log::rank_log(log_level level) : level_(level) {
  // nop
}

rank_log::rank_log(log_level level, const std::string& path)
  : level_(level), file_(path) {
  if (!file_)
    throw error{error_code::config, path + ": " + std::strerror(errno)};
}

void rank_log::write(log_level level, std::string_view text) {
  if (level > level_)
    return;
  std::lock_guard guard{mutex_};
  std::tm now{};
  auto seconds = std::time(nullptr);
  ::localtime_r(&seconds, &now);
  auto line = fmt::format("{:%H:%M:%S} {}\n", now, text);
  if (file_.is_open())
    file_ << line << std::flush;
  else
    print_stderr("{}", line);
}

void rank_log::info(std::string_view text) {
  write(log_level::info, text);
}

void rank_log::on_start(const train_start& x) {
  if (!x.resumed_from.empty())
    info(fmt::format("goes on from {}", x.resumed_from));
  info(fmt::format("owns {} of {} parameters", with_commas(x.owned),
                   with_commas(x.parameters)));
}

void rank_log::on_step(const step_metrics& x) {
  write(x.step == 1 ? log_level::info : log_level::debug,
        fmt::format("step {}: loss {:.4f}, {}, {} requests and {} on all ranks",
                    x.step, plain_number(x.loss), duration_text(x.step_seconds),
                    x.requests, bytes_text(x.bytes_sent)));
}

void rank_log::on_evaluation(uint64_t step, double loss) {
  info(fmt::format("after {} steps: held-out loss {:.4f}", step,
                   plain_number(loss)));
}

void rank_log::on_checkpoint(uint64_t step, const saved_checkpoint& x) {
  info(fmt::format("checkpoint at step {}: {}, {}; steps waited {}", step,
                   x.folder, bytes_text(x.bytes), duration_text(x.seconds)));
}

} // namespace smp::app
