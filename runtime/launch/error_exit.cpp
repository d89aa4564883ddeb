#include "runtime/launch/error_exit.hpp"

#include "runtime/base/print_stderr.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/launch/run_outcome.hpp"
#include "runtime/launch/shared_segments.hpp"
#include "runtime/process/limits.hpp"
#include "runtime/process/shared_flights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

namespace smp {

namespace {

std::terminate_handler terminate_before = nullptr;

/// Other ranks may end for the same reason. Rank 0 prints the reason itself;
/// the launcher prints the last words of another rank if that was the cause.
bool leave_last_words(const char* text) {
  auto* rank = std::getenv("SMP_RANK");
  return rank != nullptr && std::string_view{rank} != "0"
         && std::getenv(last_words_variable) != nullptr
         && leave_word(last_word::why, text);
}

[[noreturn]] void end_with(const error& x) {
  static std::atomic<bool> ending = false;
  while (ending.exchange(true))
    ::pause(); // another thread is about to end the process
  // The program's own output comes first.
  std::cout.flush();
  std::fflush(nullptr);
  if (x.code() == error_code::rank_down)
    leave_word(last_word::heard);
  if (!told_by_others(x.code()) && !leave_last_words(x.what()))
    tell_why(fmt::format("{}{}\n", error_prefix, x.what()), x.what());
  // The destructor of the session may not have run.
  remove_segments_of_lost_ranks();
  std::_Exit(exit_code_of(x.code()));
}

void on_terminate() {
  if (auto x = std::current_exception())
    try {
      std::rethrow_exception(x);
    } catch (const error& err) {
      end_with(err);
    } catch (const std::exception& other) {
      if (auto err = exhausted_limit(other))
        end_with(*err);
      leave_word(last_word::why, other.what());
    } catch (...) {
      leave_word(last_word::why,
                 "an exception that does not derive from std::exception");
    }
  if (terminate_before != nullptr)
    terminate_before();
  std::abort();
}

} // namespace

bool leave_word(last_word kind, const char* text) {
  try {
    auto here = read_rank_environment();
    auto* fd = std::getenv(last_words_variable);
    if (fd == nullptr)
      fd = std::getenv(unwritten_words_variable);
    if (!here || !here->supervised || fd == nullptr)
      return false;
    auto words = fmt::format("{} {} {}", here->rank, static_cast<char>(kind),
                             text);
    // A write of at most PIPE_BUF bytes is atomic: whole or not at all.
    words.resize(std::min<size_t>(words.size(), PIPE_BUF - 1));
    words.push_back('\0');
    return ::write(std::atoi(fd), words.data(), words.size())
           == static_cast<ssize_t>(words.size());
  } catch (const error&) { // the environment is wrong
    return false;
  }
}

void tell_why(const std::string& line, const char* text) {
  auto told = print_stderr("{}", line);
  leave_word(told ? last_word::told : last_word::why, text);
}

int exit_code_of(error_code x) noexcept {
  switch (x) {
    case error_code::config:
      return 2;
    case error_code::stalled:
      return 4;
    case error_code::numbers:
      return 5;
    default:
      return 3;
  }
}

bool told_by_others(error_code x) {
  if (x != error_code::rank_down && x != error_code::stalled)
    return false; // also a bad environment
  auto environment = read_rank_environment();
  if (!environment)
    return false;
  // Our launcher reports how a rank died, if it hosts the SUPERVISOR: the
  // launcher of another machine hears of its own ranks only. Rank 0 reports how
  // all ranks are stalled.
  return x == error_code::rank_down
           ? environment->supervised
               && environment->rank == environment->local_rank
           : !environment->supervised && environment->rank > 0;
}

void end_on_uncaught_errors() {
  // Programs that a rank starts must not inherit these.
  for (auto* name : {last_words_variable, unwritten_words_variable,
                     progress_descriptor_variable, flight_descriptor_variable})
    if (auto* fd = std::getenv(name))
      ::fcntl(std::atoi(fd), F_SETFD, FD_CLOEXEC);
  if (std::get_terminate() != on_terminate)
    terminate_before = std::set_terminate(on_terminate);
}

void exit_at_once(int code) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::exit(code); // sanitizers report what they found
#else
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
#endif
}

} // namespace smp
