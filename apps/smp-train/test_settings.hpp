#pragma once

#include "runtime/config/config_file.hpp"

namespace smp::app {

/// Sets what no user needs, but tests and measurements of whole programs do,
/// from the environment:
/// - SMP_TEST_THREADS_AS_RANKS: the ranks are threads of this process;
/// - SMP_TEST_DEVICE_PATH=MB: tensors in host memory take the device path
///   (docs/internals/communication.md), through arenas of this size.
/// @throws error (config)
void set_for_tests(train_config& x);

} // namespace smp::app
