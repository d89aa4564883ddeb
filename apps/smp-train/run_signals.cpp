#include "apps/smp-train/run_signals.hpp"

#include "runtime/launch/process_group.hpp"

#include <csignal>
#include <cstdlib>

namespace smp::app {

namespace {

std::atomic<bool> was_interrupted = false;
std::atomic<bool> will_begin_again = false;
std::atomic<bool> wants_to_save = false;

void on_interrupt(int, siginfo_t* from, void*) {
  if (from->si_code == SI_QUEUE
      && from->si_value.sival_int == begins_again_value)
    will_begin_again = true;
  if (was_interrupted.exchange(true))
    std::_Exit(code_interrupted);
}

void on_save(int, siginfo_t*, void*) {
  wants_to_save = true;
}

void handle(int number, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  ::sigaction(number, &action, nullptr);
}

sigset_t user_signals() {
  sigset_t result;
  ::sigemptyset(&result);
  ::sigaddset(&result, SIGUSR1);
  ::sigaddset(&result, SIGUSR2);
  return result;
}

} // namespace

void hold_signals() {
  const auto both = user_signals();
  ::pthread_sigmask(SIG_BLOCK, &both, nullptr);
}

void catch_signals(const train_config& config, bool supervised) {
  handle(SIGINT, on_interrupt);
  const auto& x = config.checkpoint;
  if (!x.dir.empty() && x.on_interrupt && !supervised)
    handle(SIGTERM, on_interrupt);
  if (auto number = save_signal(config); number != 0)
    handle(number, on_save);
  const auto both = user_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &both, nullptr);
}

const std::atomic<bool>& interrupted() noexcept {
  return was_interrupted;
}

bool begins_again() noexcept {
  return will_begin_again;
}

bool take_wish_to_save() noexcept {
  return wants_to_save.exchange(false);
}

int save_signal(const train_config& config) noexcept {
  auto& name = config.checkpoint.signal;
  return name == "SIGUSR1" ? SIGUSR1 : name == "SIGUSR2" ? SIGUSR2 : 0;
}

} // namespace smp::app
