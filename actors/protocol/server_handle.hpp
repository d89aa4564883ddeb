#pragma once

#include "actors/protocol/actors.hpp"

namespace smp {

/// Hides CAF from those who only pass a MODULE SERVER on.
struct server_handle {
  module_server_actor actor;
};

} // namespace smp
