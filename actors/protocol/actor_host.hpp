#pragma once

// The actor system of a process, in a header that does not include CAF.

#include <memory>

namespace smp {

/// The actor system of a process, shared by all ranks that live in it. Its pool
/// has one thread, as more threads only cost wake-ups (measured), so no handler
/// may block.
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
