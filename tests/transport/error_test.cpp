#include "tests/support/catch.hpp"

#include "transport/error.hpp"

#include <set>
#include <string>

using namespace smp;

TEST_CASE("a failure describes where and what it is in one line",
          "[transport][error]") {
  failure x{error_code::user_code, rank_id{1}, "blocks.3", "no such key"};
  CHECK(x.describe() == "rank 1, module blocks.3: no such key");
  x.module.clear();
  CHECK(x.describe() == "rank 1: no such key");
  x.rank = no_rank;
  CHECK(x.describe() == "no such key");
  x.module = "head";
  CHECK(x.describe() == "module head: no such key");
}

TEST_CASE("only a failure without a code counts as none",
          "[transport][error]") {
  CHECK_FALSE(failure{});
  failure x;
  x.code = error_code::internal;
  CHECK(x);
}

TEST_CASE("an error that names no rank does not blame rank 0",
          "[transport][error]") {
  error x{error_code::config, "train.toml:3: unknown key"};
  CHECK(std::string{x.what()} == "train.toml:3: unknown key");
  CHECK(x.cause().rank == no_rank);
  CHECK(x.code() == error_code::config);
}

TEST_CASE("an error carries its first cause unchanged", "[transport][error]") {
  failure x{error_code::rank_down, rank_id{2}, {}, "killed by signal 9"};
  try {
    throw error{x};
  } catch (const std::runtime_error& e) {
    CHECK(std::string{e.what()} == "rank 2: killed by signal 9");
    CHECK(dynamic_cast<const error&>(e).cause() == x);
  }
}

TEST_CASE("every error code has a name of its own", "[transport][error]") {
  std::set<std::string> names;
  auto last = static_cast<int>(error_code::internal);
  for (int i = 0; i <= last; ++i)
    names.insert(to_string(static_cast<error_code>(i)));
  CHECK(names.size() == static_cast<size_t>(last) + 1);
  CHECK_FALSE(names.contains("unknown"));
}
