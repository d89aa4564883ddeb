// The cases of a file share a process and with it torch's generator. A case
// that seeds nothing must draw the same numbers alone and behind all others.

#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>

#include <ATen/Context.h>

namespace {

class same_numbers : public Catch::EventListenerBase {
public:
  using EventListenerBase::EventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo&) override {
    at::manual_seed(c10::default_rng_seed_val);
  }
};

CATCH_REGISTER_LISTENER(same_numbers)

} // namespace
