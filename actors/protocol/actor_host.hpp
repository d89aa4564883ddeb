#pragma once

// The actor system of a process without CAF in sight.

#include <memory>

namespace smp {

/// The actor system of a process; every rank of the process lives in it. Its
/// pool has one thread (facts: more threads cost wake-ups), so no handler may
/// block.
class actor_host {
public:
  actor_host();
  ~actor_host();
  actor_host(const actor_host&) = delete;
  actor_host& operator=(const actor_host&) = delete;

  struct impl;

  impl& get() noexcept {
    return *impl_;
  }

private:
  std::unique_ptr<impl> impl_;
};

} // namespace smp
