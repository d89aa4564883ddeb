#pragma once

// How a rank joins a run.

#include "transport/error.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

struct stall_options {
  /// Seconds without any progress before a report.
  double timeout = 60;
  /// Ends the run after a long wait; otherwise only reports it.
  bool end = false;
};

/// How a rank introduces itself to the SUPERVISOR.
struct member {
  rank_id rank;
  int64_t pid = 0;
  std::string host;
  /// Equal on all ranks of one machine and different on all others.
  std::string machine;
  /// The cores of the machine on which the rank may run, by number.
  std::vector<uint32_t> cores;
  /// Tells runs apart: a rank that joins the wrong run is refused.
  std::string run_id;
  /// Must be equal on all ranks; a rank that differs is refused by name.
  std::string build;
  /// A line "KEY = VALUE" for each setting that all ranks must share.
  std::string settings;
  /// `fabric::address()`, opaque bytes.
  std::string fabric_address;
  /// The settings of its session. Those of rank 0 apply to the run unless
  /// whoever started the run set them already.
  stall_options stalls;
};

/// Reply to a rank that joins: all members, or why it may not.
struct welcome {
  std::vector<member> members; // by rank
  failure error;
};

} // namespace smp
