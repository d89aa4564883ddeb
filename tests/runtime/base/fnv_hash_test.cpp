#include "tests/support/catch.hpp"

#include "runtime/base/fnv_hash.hpp"

using namespace smp;

namespace {

uint64_t hash_of(std::string_view x) {
  fnv_hash result;
  result.add_open(x);
  return result.get();
}

} // namespace

TEST_CASE("a hash has the value that its authors publish", "[runtime]") {
  CHECK(hash_of("") == 0xcbf29ce484222325);
  CHECK(hash_of("a") == 0xaf63dc4c8601ec8c);
  CHECK(hash_of("foobar") == 0x85944171f73967e8);
}

TEST_CASE("a hash tells apart where one text ends and the next begins",
          "[runtime]") {
  fnv_hash a;
  a.add("ab");
  a.add("c");
  fnv_hash b;
  b.add("a");
  b.add("bc");
  CHECK(a.get() != b.get());
}
