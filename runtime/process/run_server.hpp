#pragma once

// The program that serves a run to browsers and Prometheus, beside its ranks.

#include "transport/files/file_descriptor.hpp"

#include <memory>
#include <string>

#include <sys/types.h>

namespace smp {

/// `smp-inspect RUN_DIR serve` as a child of this process: strangers who
/// connect to it reach neither a rank nor the launcher.
class run_server {
public:
  /// HOST:PORT each; empty: nothing is served there.
  struct addresses {
    std::string web;
    std::string prometheus;
  };

  /// Starts it, and says where it serves. It ends with the calling thread.
  /// @returns null if nothing is to be served
  /// @throws error (config) with what it says if it cannot serve, as where
  /// another program has the port
  static std::unique_ptr<run_server> start(const std::string& run_dir,
                                           const addresses& x);

  ~run_server();
  run_server(const run_server&) = delete;
  run_server& operator=(const run_server&) = delete;

private:
  run_server(const std::string& run_dir, const addresses& x);

  /// @returns what it says until `lines` are there or it ends
  std::string read_lines(size_t lines) const;

  pid_t pid_ = -1;
  file_descriptor output_;
};

} // namespace smp
