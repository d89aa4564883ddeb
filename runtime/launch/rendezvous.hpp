#pragma once

// How rank 0 tells the others where the SUPERVISOR listens, in a run that
// another launcher (mpirun, srun) started.

#include "runtime/launch/environment.hpp"

#include <chrono>
#include <cstdint>
#include <string>

namespace smp {

/// The port in a file that others of the same user can read; the file goes
/// with this object.
class published_port {
public:
  /// Names the file after `run_id` in `rendezvous_dir`. It appears at once and
  /// complete, and replaces what an earlier run with this id left behind.
  /// @throws error (config) if the directory cannot be used
  published_port(const rank_environment& x, uint16_t port);
  ~published_port();
  published_port(const published_port&) = delete;
  published_port& operator=(const published_port&) = delete;

private:
  std::string path_;
};

/// @returns a port that is published until the result dies.
[[nodiscard]] inline published_port publish_port(const rank_environment& x,
                                                 uint16_t port) {
  return published_port{x, port};
}

/// Waits for rank 0 to publish; a file whose writer is dead does not count.
/// @throws error (rank_down) naming rank 0 and the file after `limit`
uint16_t await_port(const rank_environment& x, std::chrono::milliseconds limit);

} // namespace smp
