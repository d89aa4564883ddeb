#pragma once

namespace smp::sim {

/// From now on the product makes this mistake (runtime/base/fault.hpp) on every
/// thread.
/// @param name a literal; null: none
void seed_mistake(const char* name) noexcept;

} // namespace smp::sim
