#pragma once

// One attempt at a run, as one of its launchers sees it.

#include "runtime/launch/launcher.hpp"
#include "runtime/launch/network_choice.hpp"
#include "runtime/launch/process_group.hpp"
#include "runtime/launch/run_outcome.hpp"
#include "transport/error.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// What the first launcher tells the others about an attempt.
struct attempt_note {
  std::string log_dir;
  /// Number of ranks of each machine, in order; 0: it has to wait.
  std::vector<uint64_t> shares;
  /// How often the run was started again.
  uint64_t restarts = 0;
  /// See `run_position::newest`.
  bool newest = false;
};

/// The note as a gate passes it on, at most 4096 bytes.
std::string to_text(const attempt_note& x);

/// @throws error (config) if the launcher there is not one of ours
attempt_note attempt_note_from(const std::string& text);

/// What the launchers of a run agree on, and the part of this one.
struct launch_place {
  uint64_t machine = 0;
  uint64_t first_rank = 0;
  uint64_t ranks = 1; // of this machine
  uint64_t world_size = 1;
  run_secret secret;
  std::string run_id;
  attempt_note note;
  network_choice network;
  /// Through it the ranks report how far they came.
  file_descriptor progress;
  /// Where they note what they do.
  file_descriptor flights;
  /// Why its ranks must not share memory through files; unset: they may.
  std::optional<std::string> no_shared_memory;

  bool first() const noexcept {
    return machine == 0;
  }

  /// Empty: there are no logs.
  const std::string& log_dir() const noexcept {
    return note.log_dir;
  }

  /// Whether the process of that rank belongs to this launcher.
  bool has(rank_id x) const noexcept {
    return x.value - first_rank < ranks; // wraps below it
  }

  /// @returns how far a rank of this launcher came
  rank_progress progress_of(uint64_t rank) const;

  /// @param secret_fd the descriptor that holds it
  /// @param port of the SUPERVISOR
  std::map<std::string, std::string> variables_of(uint64_t rank,
                                                  const launch_options& x,
                                                  int secret_fd,
                                                  uint16_t port) const;

  /// @returns what the processes of this launcher have in common
  process_group::options group_options(const launch_options& x,
                                       int secret_fd) const;

  /// For later reading: what the ranks here did last.
  void write_flights() const;
};

/// The first launcher makes a secret for each attempt; the others ask it.
/// @param note of the first launcher; elsewhere only `log_dir` counts, which
///        the user may give
/// @param again set where the run may be started again
/// @returns nothing if `again` gave up
/// @throws error (config), (rank_down) as `ask_master`
std::optional<launch_place>
find_place(const launch_options& x, attempt_note note,
           const std::optional<repeated_question>& again);

} // namespace smp
