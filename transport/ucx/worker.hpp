#pragma once

#include "transport/ucx/ucx_fabric.hpp"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace smp::ucx {

/// @throws error of code `transport`, saying what failed
void check(ucs_status_t status, const std::string& what);

/// Owns a UCX context with one worker. Any thread may use it, one at a time.
class worker {
public:
  worker(const ucx_options& options);
  ~worker();
  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;

  ucp_worker_h get() const noexcept {
    return worker_;
  }

  /// @returns the descriptor that becomes readable after `ucp_worker_arm`.
  int event_fd() const;

  /// @returns what other workers need to connect to this one.
  std::string address() const;

  /// @returns the largest header of an active message, in bytes.
  size_t max_header() const;

  /// Registers memory with the transports, for the lifetime of this worker.
  void register_memory(std::shared_ptr<std::byte> x, uint64_t size);

private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<std::pair<ucp_mem_h, std::shared_ptr<std::byte>>> registered_;
};

/// @returns the names of the transports that `x` uses, e.g. "posix cma".
std::string transports_of(ucp_ep_h x);

} // namespace smp::ucx
