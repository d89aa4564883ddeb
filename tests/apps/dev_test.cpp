#include "tests/support/catch.hpp"

#include "tests/support/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <string>

// What `./dev` decides before it installs anything.

using Catch::Matchers::StartsWith;
using namespace smp::test;

namespace {

/// @param there dependencies that are installed, by the variables of their
/// directories
/// @returns the Debian packages that the others need
std::string packages_beside(const std::string& there) {
  scratch_dir dir;
  program p{{"bash", "-c", R"(set -euo pipefail
unset SMP_TORCH_DIR SMP_UCX_DIR
root=$1 deps=$2
. "$root/cmake/dependencies.sh"
for prefix in $3; do
  mkdir -p "${!prefix}"
  echo "$recipe" >"${!prefix}/.complete"
done
packages_for_deps)",
             "dev", source_file("."), dir.path.string(), there}};
  auto code = p.join();
  INFO(p.output());
  CHECK(code == 0);
  return p.output();
}

} // namespace

TEST_CASE("what unpacks a dependency is installed, whichever is missing",
          "[apps][dev]") {
  CHECK_THAT(packages_beside(""), StartsWith("unzip\n"));
  CHECK_THAT(packages_beside("torch_prefix"), StartsWith("unzip\n"));
  CHECK_THAT(packages_beside("ucx_prefix"), StartsWith("unzip\n"));
  CHECK(packages_beside("torch_prefix ucx_prefix").empty());
}
