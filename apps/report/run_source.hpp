#pragma once

// A run as seen by a program that polls it.

#include "actors/client.hpp"
#include "apps/report/run_files.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp::app {

/// The result of one look at a run.
struct run_look {
  enum class state : uint8_t {
    live,        // it answered
    starting,    // it cannot be asked yet
    ended,       // the run is over
    unreachable, // should be there but does not answer
  };

  state what = state::unreachable;
  /// In words: what it waits for, how it ended, or why it does not answer.
  std::string text;
  /// Set if it answered.
  std::optional<run_status> status;
  run_files files;
};

/// @returns "running", "starting", "ended", "unreachable"
const char* to_string(run_look::state x) noexcept;

/// @returns one line for each thing that is wrong; none if all is well
std::vector<std::string> problems_of(const run_look& x);

class run_source {
public:
  /// @param place a run directory or HOST:PORT
  /// @param secret_file of an address: holds the secret, see docs/inspect.md
  /// @throws error (config) if there is no such run, or its file may be read
  /// by others
  run_source(std::string place, std::string secret_file = {});

  /// Takes less than a second, even if ranks are stuck.
  /// @param patience time to ask again, each time longer, a run that does not
  ///        answer in time although its process runs: the machine is busy
  run_look look(std::chrono::milliseconds patience = {});

  /// @param now what the last look found
  /// @returns the events of those ranks that answer, and of others what the run
  /// directory has; none if the run left none
  /// @throws error (transport) if the run does not answer in time, (protocol)
  /// if a file is damaged
  std::vector<flight_log> events(const run_look& now);

  /// The last events of a live run, for who asks again and again. Throws as
  /// `events`
  std::vector<flight_log> recent_events(const run_look& now);

  /// Lets the ranks of a live run keep all events for some whole steps.
  /// @param now what the last look found
  /// @returns them, without others
  /// @throws error (config) if the run is not live, (stalled) if the steps are
  /// not over within `limit`
  std::vector<flight_log> trace(const run_look& now, uint64_t steps,
                                std::chrono::seconds limit);

  /// @param now what the last look found
  /// @returns what the threads of the ranks of a live run are doing, of those
  /// that answer. Throws as `events`
  std::vector<process_stacks> stacks(const run_look& now);

  const std::string& place() const noexcept {
    return place_;
  }

private:
  void ask(const inspection_entry& x, run_look& to,
           std::chrono::milliseconds patience);
  /// @param times the limits of one look
  /// @returns whether it took that long to fail
  bool ask_once(const inspection_entry& x, run_look& to, int times);
  void look_at_files(run_look& to) const;

  std::string place_;
  std::optional<inspection_entry> address_; // not a directory
  std::unique_ptr<run_client> client_;
};

} // namespace smp::app
