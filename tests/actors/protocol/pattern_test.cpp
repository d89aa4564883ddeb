#include "tests/support/catch.hpp"

#include "tests/support/actors/actor_fixture.hpp"

#include <caf/stateful_actor.hpp>

#include <cstdint>
#include <optional>

using namespace smp;

namespace {

// -- the logic: no CAF in it (in actors/ a header and a source of its own) ----

/// A single loss is noise, so nobody can tell from it when to stop. This waits
/// until no loss was a new best one for a while.
class plateau {
public:
  /// @param patience steps, at least 1
  explicit plateau(uint64_t patience) : patience_(patience) {
    // nop
  }

  /// @returns true if the last `patience` losses brought nothing.
  bool add(double loss) {
    if (!best_ || loss < *best_) {
      best_ = loss;
      waited_ = 0;
    } else {
      ++waited_;
    }
    return waited_ >= patience_;
  }

  uint64_t waited() const noexcept {
    return waited_;
  }

private:
  uint64_t patience_;
  uint64_t waited_ = 0;
  std::optional<double> best_;
};

// -- the interface (in actors/protocol/actors.hpp) ----------------------------

/// PLATEAU DETECTOR: tells when the loss stops falling.
using plateau_detector_actor = caf::typed_actor<
  // Takes the loss of a step; replies true when it is time to stop.
  caf::result<bool>(double),
  // Replies with the number of steps since the best loss.
  caf::result<uint64_t>(status_atom)>;

// -- the actor (in actors/ a header and a source of its own) ------------------

struct plateau_detector_state {
  static inline const char* name = "smp.plateau-detector";

  using pointer = plateau_detector_actor::stateful_pointer<
    plateau_detector_state>;

  explicit plateau_detector_state(pointer self) : self(self) {
    // nop
  }

  pointer self;
  std::optional<plateau> logic;
};

plateau_detector_actor::behavior_type
plateau_detector(plateau_detector_state::pointer self, uint64_t patience) {
  self->state.logic.emplace(patience);
  return {
    [self](double loss) { return self->state.logic->add(loss); },
    [self](status_atom) { return self->state.logic->waited(); },
  };
}

// -- its test (in a file of its own below tests/actors/) ----------------------

struct plateau_fixture : actor_fixture {
  plateau_fixture() : detector(own(sys.spawn(plateau_detector, uint64_t{2}))) {
    sched.run();
  }

  plateau_detector_actor detector;
};

} // namespace

TEST_CASE_METHOD(plateau_fixture,
                 "the plateau detector waits for as long as it was told",
                 "[actors][pattern]") {
  CHECK_FALSE(ask<bool>(detector, 3.0));
  CHECK_FALSE(ask<bool>(detector, 3.5));
  CHECK_FALSE(ask<bool>(detector, 2.5)); // a new best one: from the start
  CHECK_FALSE(ask<bool>(detector, 2.6));
  CHECK(ask<bool>(detector, 2.7));
}

TEST_CASE_METHOD(plateau_fixture, "the plateau detector tells where it stands",
                 "[actors][pattern]") {
  CHECK(ask<uint64_t>(detector, status_atom_v) == 0);
  ask<bool>(detector, 1.0);
  ask<bool>(detector, 1.0);
  CHECK(ask<uint64_t>(detector, status_atom_v) == 1);
}
