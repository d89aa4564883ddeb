#include "apps/smp-train/test_settings.hpp"

#include "transport/error.hpp"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <system_error>

namespace smp::app {

void set_for_tests(train_config& x) {
  x.threads_as_ranks = std::getenv("SMP_TEST_THREADS_AS_RANKS") != nullptr;
  auto* text = std::getenv("SMP_TEST_DEVICE_PATH");
  if (text == nullptr)
    return;
  const std::string_view given{text};
  uint64_t arena = 0;
  auto end = given.data() + given.size();
  if (auto read = std::from_chars(given.data(), end, arena);
      read.ec != std::errc{} || read.ptr != end)
    throw config_error("SMP_TEST_DEVICE_PATH is no number of MB");
  x.smp.device_path = {.force = true,
                       .send_arena = arena,
                       .receive_arena = arena,
                       .ranks_per_node = 0};
}

} // namespace smp::app
