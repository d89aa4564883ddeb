#pragma once

#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>

namespace smp::test {

/// @throws std::runtime_error if the step before left saved calls, objects,
///         requests that wait for answers, or requests that wait to be served
inline void check_nothing_left(session& s) {
  auto& eng = s.internals();
  auto calls = eng.calls().size();
  auto objects = eng.objects().held() + eng.objects().cached();
  auto status = eng.actors().status(std::chrono::seconds{20});
  auto waiting = status.ready + status.held + status.blocked;
  if (calls + objects + status.pending + waiting > 0)
    throw std::runtime_error{fmt::format(
      "rank {}: {} saved calls, {} objects, {} requests and {} that wait to "
      "be served are left after a step",
      s.rank(), calls, objects, status.pending, waiting)};
}

} // namespace smp::test
