#pragma once

// How rank 0 tells the other ranks where the SUPERVISOR listens, and the secret
// of the run, if another launcher (mpirun, srun) started it.

#include "runtime/launch/environment.hpp"
#include "transport/files/run_secret.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// What the ranks of a run need to find each other.
struct meeting_point {
  uint16_t port = 0;
  /// Unset if the user gave it to all ranks (`given_secret`), or if ranks that
  /// have the keys ask for it.
  std::optional<run_secret> secret;
  std::string address = "127.0.0.1";
};

/// Publishes the meeting point in a file that only processes of the same user
/// can read; the file is removed with this object.
class published_point {
public:
  /// Names the file after `run_id` in `rendezvous_dir`. It appears atomically,
  /// and replaces the file of an earlier run with this id.
  /// @throws error (config) if the directory cannot be used
  published_point(const rank_environment& x, const meeting_point& point);
  ~published_point();
  published_point(const published_point&) = delete;
  published_point& operator=(const published_point&) = delete;

private:
  std::string path_;
};

/// Waits for rank 0 to publish; ignores a file whose writer is dead.
/// @throws error (rank_down) naming rank 0 and the file after `limit`, (config)
/// if others can read the file, or if rank 0 is on another machine and can be
/// reached only there
meeting_point await_point(const rank_environment& x,
                          std::chrono::milliseconds limit);

} // namespace smp
