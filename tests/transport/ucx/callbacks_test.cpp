// ctest: processors=2

#include "tests/support/catch.hpp"

#include "tests/support/actors/cluster.hpp"
#include "tests/support/actors/payloads.hpp"
#include "transport/placing_fabric.hpp"

#include <memory>
#include <new>
#include <string>

using namespace smp;
using namespace smp::test;

namespace {

/// Finds no memory when it hears where a tensor lies.
struct starving_places : tensor_places {
  std::shared_ptr<std::byte> place(const arriving_tensor&) override {
    return nullptr;
  }

  void placed(rank_id, uint64_t, bool) override {
    throw std::bad_alloc{};
  }
};

} // namespace

TEST_CASE("nothing that is thrown leaves a callback of UCX",
          "[transport][ucx]") {
  auto kind = GENERATE(as<std::string>{}, "shm", "tcp");
  CAPTURE(kind);
  starving_places places;
  cluster c{kind, 2, [&](uint64_t, fabric& x) {
              dynamic_cast<placing_fabric&>(x).place_with(places);
            }};
  dynamic_cast<placing_fabric&>(c.at(0)).send_marked(
    rank_id{1}, make_message("x", {make_tensor(100000, 1)}), {17},
    c.heard(0).on_sent());
  REQUIRE(c.heard(0).wait_losses(1));
  CHECK(c.heard(0).losses()[0].describe()
        == "rank 1: no memory for what it sends: it is cut off");
  // It goes on.
  c.at(0).send(rank_id{0}, make_message("to itself"), c.heard(0).on_sent());
  CHECK(c.heard(0).wait_messages(1));
}
