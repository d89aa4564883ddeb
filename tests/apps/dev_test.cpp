#include "tests/support/catch.hpp"

#include "tests/support/runs/program.hpp"
#include "tests/support/scratch_dir.hpp"

#include <filesystem>
#include <string>

// What `./dev` decides before it installs anything, and what `./dev test` says.

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::EndsWith;
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

namespace {

/// What `./dev` finds of GPUs, and whether a LibTorch without libraries for
/// them is enough then, if this driver is there (tests/no_driver).
struct driver_row {
  std::string version;
  std::string gpus;
  std::string wish; // SMP_CUDA
  std::string found;
};

std::string found_by_dev(const driver_row& x) {
  scratch_dir dir;
  std::filesystem::copy_file(built_program("../lib/smp_no_driver.so"),
                             dir.path / "libcuda.so.1");
  program p{{"bash", "-c", R"(set -euo pipefail
root=$1 deps=$2
. "$root/cmake/dependencies.sh"
find_cuda
mkdir "$torch_prefix"
echo "$recipe" >"$torch_prefix/.complete"
complete "$torch_prefix" && echo "enough" || echo "libraries are missing")",
             "dev", source_file("."), dir.path.string()},
            ".",
            {{"LD_LIBRARY_PATH", dir.path},
             {"SMP_CUDA", x.wish},
             {"SMP_TEST_CUDA_VERSION", x.version},
             {"SMP_TEST_CUDA_GPUS", x.gpus},
             {"SMP_TEST_CUDA_INIT", ""}}};
  p.join();
  return p.output();
}

} // namespace

TEST_CASE("the libraries for GPUs are installed where a driver finds one",
          "[apps][dev]") {
  auto x = GENERATE(values<driver_row>({
    {"13000", "1", "", "libraries are missing"},
    {"13000", "1", "0", "enough"},
    {"13000", "0", "", "enough"},
    {"12040", "1", "", "enough"},
    {"12040", "0", "1", "libraries are missing"},
    {"13000", "1", "yes", "dev: SMP_CUDA=yes; write 1"},
  }));
  CAPTURE(x.version, x.gpus, x.wish);
  CHECK_THAT(found_by_dev(x), StartsWith(x.found));
}

namespace {

/// @returns what the functions of `./dev test` say after this script
std::string after(const std::string& script, const scratch_dir& dir) {
  program p{{"bash", "-c", R"(set -euo pipefail
root=$1 build=$2 deps=$2 preset=release
. "$root/cmake/dependencies.sh"
. "$root/cmake/test_run.sh"
find_python() { :; }
)" + script,
             "dev", source_file("."), dir.path.string()}};
  p.join();
  return p.output();
}

/// A ctest of each kind. "chance" fails the first time that it runs.
struct tests_of_each_kind : scratch_dir {
  tests_of_each_kind() {
    write("CTestTestfile.cmake", R"(
add_test(a/good "true")
add_test(a/chance "bash" "-c" "[[ -f ran ]] || { : >ran; echo odd; exit 1; }")
add_test(a/bad "bash" "-c" "echo wrong; exit 1")
add_test(a/skips "bash" "-c" "echo skipped: a case: no device; exit 4")
set_tests_properties(a/skips PROPERTIES SKIP_RETURN_CODE 4)
add_test(a/missing "/no/such/program")
foreach(number RANGE 1 200)
  add_test(many/of-a-name-that-is-not-short/${number} "true")
endforeach()
)");
    write("tests/seconds.txt", "a/good 10\na/bad 10\n");
  }
};

} // namespace

TEST_CASE("a test that fails beside others and passes alone is told as flaky",
          "[apps][dev]") {
  tests_of_each_kind dir;
  auto output = after("run_tests -R a/", dir);
  INFO(output);
  for (auto text :
       {"running again what failed, one at a time: a/chance a/bad a/missing\n",
        "flaky: a/chance failed beside others and passed alone\n",
        "dev: failed: a/bad\n", "dev: failed: a/missing\n", "wrong\n",
        "skipped: a case: no device\n", "./dev test -R '^(a/bad|a/missing)$'\n",
        "\n60% tests passed, 2 tests failed out of 5\n"})
    CHECK_THAT(output, ContainsSubstring(text));
  // Nothing is left of the first time but the word.
  CHECK_THAT(output, !ContainsSubstring("failed: a/chance"));
  auto second = after("run_tests -R 'good|chance'", dir);
  INFO(second);
  CHECK_THAT(second, !ContainsSubstring("flaky"));
  CHECK_THAT(second,
             ContainsSubstring("100% tests passed, 0 tests failed out of 2"));
}

TEST_CASE("the longest of many tests are told, and their sum at last",
          "[apps][dev]") {
  tests_of_each_kind dir;
  auto output = after("run_tests -R many", dir);
  INFO(output);
  CHECK_THAT(output, ContainsSubstring("the ten longest of "));
  CHECK_THAT(output, ContainsSubstring(
                       "\n100% tests passed, 0 tests failed out of 200\n"));
}

TEST_CASE("what a sanitizer sees by chance stays a failure", "[apps][dev]") {
  tests_of_each_kind dir;
  auto output = after("preset=debug; run_tests -R chance || echo failed", dir);
  INFO(output);
  CHECK_THAT(output, EndsWith("\nfailed\n"));
  CHECK_THAT(output, !ContainsSubstring("flaky"));
}

TEST_CASE("four commits in a row of quarters take every file", "[apps][dev]") {
  scratch_dir dir;
  auto output = after(R"(
differs_from() { echo changed; }
for number in 0 1 2 3; do
  quarter() { echo $number; }
  printf 'a\nb\nc\nd\ne\nchanged\n' | of_this_run quarter | tr '\n' ' '
  echo
done
differs_from() { :; }
quarter() { echo 1; }
echo in a clone of one commit: $(printf 'a\nb\n' | of_this_run quarter)
differs_from() { echo changed; }
echo all: $(printf 'a\nb\n' | of_this_run all)
echo differ: $(printf 'a\nchanged\n' | of_this_run changed))",
                      dir);
  CHECK(output
        == "d changed \na e changed \nb changed \nc changed \n"
           "in a clone of one commit: a\nall: a b\ndiffer: changed\n");
}

TEST_CASE("the tests of a changed file are those of its folder",
          "[apps][dev]") {
  scratch_dir dir;
  auto folders = [&](const std::string& file) {
    return after("echo '" + file + "' | folders_of_tests", dir);
  };
  CHECK(folders("runtime/calls/callee.cpp") == "runtime/calls\n");
  CHECK(folders("tests/runtime/calls/callee_test.cpp") == "runtime/calls\n");
  CHECK(folders("runtime/intercept/script/rewrite.cpp")
        == "runtime/intercept\n");
  CHECK(folders("apps/smp-train/main.cpp") == "apps\n");
  CHECK(folders("tests/support/runs/program.cpp") == ".\n");
  CHECK(folders("cmake/tests.cmake") == ".\n");
  CHECK(folders("docs/api.md").empty());
}
