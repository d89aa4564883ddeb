#include "tests/support/catch.hpp"

#include "actors/protocol/actors.hpp"

using namespace smp;

namespace {

/// How many type ids of users and of smp come before that of `T`.
template <class T>
constexpr int position = caf::type_id_v<T> - caf::first_custom_type_id;

} // namespace

// Two builds tell each other apart by name only if they agree on the messages
// of the handshake, and a plug-in only fits if its types keep their numbers.
TEST_CASE("type ids are only ever appended", "[actors][protocol]") {
  CHECK(position<member> == 0);
  CHECK(position<welcome> == 1);
  CHECK(position<rank_id> == 2);
  CHECK(position<failure> == 3);
  CHECK(position<server_status> == 18);
  CHECK(position<status_atom> == 22);
  CHECK(position<rank_view> == 35);
  CHECK(position<stall_atom> == 38);
  CHECK(position<member_actor> == 41);
  CHECK(position<rank_watch_actor> == 42);
  CHECK(position<inspector_actor> == 44);
  CHECK(position<launcher_link_actor> == 45);
  CHECK(position<rank_status> == 60);
  CHECK(position<inspect_atom> == 62);
  CHECK(position<task> == 100);
  CHECK(position<schedule_answer> == 108);
  CHECK(first_user_type_id == caf::first_custom_type_id + 200);
}
