#pragma once

// Exit codes of the programs that look at a run.

#include "apps/report/run_source.hpp"

namespace smp::app {

inline constexpr int exit_well = 0;
inline constexpr int exit_wrong = 1;
inline constexpr int exit_usage = 2;
inline constexpr int exit_ended = 3;

inline int code_of(const run_look& x) {
  if (x.what == run_look::state::ended)
    return exit_ended;
  return problems_of(x).empty() ? exit_well : exit_wrong;
}

} // namespace smp::app
