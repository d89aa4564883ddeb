#include "tests/simulated/backend/failures.hpp"

#include "tests/simulated/driver/failures.hpp"

#include <c10/util/Exception.h>

namespace smp::sim {

void check_device(c10::DeviceIndex device) {
  constexpr auto code = 700; // as of an illegal address
  if (has_failed(device))
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code,
                                "sim error: a kernel has failed");
}

} // namespace smp::sim
