#pragma once

#include "transport/wait.hpp"

namespace smp {

/// Marks all waits of the calling thread in its scope as waits for peers
/// (`wait_reason::for_peers`).
class wait_for_peers final : public waiter {
public:
  void wait(const completion_ptr& x, const wait_reason& why) override {
    auto mine = why;
    mine.for_peers = true;
    beneath_.wait(x, mine);
  }

private:
  waiter& beneath_ = waiter::current();
  scoped_waiter scope_{*this};
};

} // namespace smp
