#include "tests/support/catch.hpp"

#include "actors/inspection/entry_file.hpp"
#include "apps/report/exit_codes.hpp"
#include "apps/report/run_source.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/run_secret.hpp"

#include <optional>

using namespace smp;
using namespace smp::app;
using namespace smp::test;

TEST_CASE("A run that nobody can be asked about yet is starting",
          "[apps][inspect]") {
  scratch_dir dir;
  dir.write("log-0.txt", "");
  std::optional<published_entry> entry;
  entry.emplace(dir.path, entry_of_this_process(0, run_secret::make()));
  run_source source{dir.path};
  auto look = source.look();
  CHECK(look.what == run_look::state::starting);
  CHECK(to_string(look.what) == std::string{"starting"});
  CHECK(problems_of(look).empty());
  CHECK(code_of(look) == exit_well);
  entry.reset();
  look = source.look();
  CHECK(look.what == run_look::state::ended);
  CHECK(code_of(look) == exit_ended);
}
