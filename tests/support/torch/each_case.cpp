// The cases of a file share a process and with it torch's generator. A case
// that seeds nothing must draw the same numbers alone and behind all others.
// And what a case computes by itself must have the code of MKL that a rank has
// (runtime/base/vector_math.hpp), though its threads are the first that call
// it.

#include "runtime/base/vector_math.hpp"

#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>

#include <ATen/Context.h>

namespace {

class same_numbers : public Catch::EventListenerBase {
public:
  using EventListenerBase::EventListenerBase;

  void testRunStarting(const Catch::TestRunInfo&) override {
    smp::warm_up_vector_math();
  }

  void testCaseStarting(const Catch::TestCaseInfo&) override {
    at::manual_seed(c10::default_rng_seed_val);
  }
};

CATCH_REGISTER_LISTENER(same_numbers)

} // namespace
