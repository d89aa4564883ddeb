#include "actors/comm/message_priority.hpp"

#include "actors/protocol/wire.hpp"

namespace smp {

uint8_t priority_of(const message& x) {
  auto what = phase_of(x);
  if (!what)
    return 1;
  return *what == phase::backward ? 0 : 2;
}

} // namespace smp
