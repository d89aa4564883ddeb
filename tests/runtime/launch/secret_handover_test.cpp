#include "tests/support/catch.hpp"

#include "runtime/launch/secret_handover.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <cstdlib>
#include <filesystem>
#include <string>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Sets a variable as long as it lives.
class with_variable {
public:
  with_variable(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }

  ~with_variable() {
    ::unsetenv(name_);
  }

  with_variable(const with_variable&) = delete;
  with_variable& operator=(const with_variable&) = delete;

private:
  const char* name_;
};

rank_environment rank_of(bool supervised) {
  rank_environment result;
  result.supervised = supervised;
  return result;
}

std::string written(const scratch_dir& dir, const std::string& text,
                    ::mode_t mode = 0600) {
  auto path = (dir.path / "secret").string();
  dir.write("secret", text);
  REQUIRE(::chmod(path.c_str(), mode) == 0);
  return path;
}

std::string refusal(const std::string& path) {
  with_variable file{secret_file_variable, path};
  return error_of([] { given_secret(rank_of(false)); }, error_code::config);
}

} // namespace

TEST_CASE("a rank of our launcher reads the secret from its descriptor",
          "[runtime][secret]") {
  auto secret = run_secret::make();
  auto fd = secret_descriptor(secret);
  with_variable given{secret_descriptor_variable, std::to_string(fd.get())};
  ::fcntl(fd.get(), F_SETFD, 0);
  // All ranks share the descriptor's position.
  for (int i = 0; i < 2; ++i) {
    auto got = given_secret(rank_of(true));
    REQUIRE(got);
    CHECK(got->to_hex() == secret.to_hex());
  }
  // What the rank starts does not get it.
  CHECK(::fcntl(fd.get(), F_GETFD) == FD_CLOEXEC);
}

TEST_CASE("a descriptor that is something else is an error",
          "[runtime][secret]") {
  scratch_dir dir;
  file_descriptor other{
    ::open(written(dir, std::string(100, 'x')).c_str(), O_RDONLY | O_CLOEXEC)};
  for (auto& text : {std::to_string(other.get()), std::string{"987654"},
                     std::string{"0"}, std::string{"nonsense"}}) {
    INFO(text);
    with_variable given{secret_descriptor_variable, text};
    CHECK_THAT(
      error_of([] { given_secret(rank_of(true)); }, error_code::config),
      ContainsSubstring("SMP_SECRET_FD=" + text));
  }
}

TEST_CASE("a rank that was told where to join needs the secret, too",
          "[runtime][secret]") {
  CHECK_THAT(error_of([] { given_secret(rank_of(true)); }, error_code::config),
             ContainsSubstring("SMP_SECRET_FILE"));
  CHECK_FALSE(given_secret(rank_of(false)));
}

TEST_CASE("a user may keep the secret in a file of his own",
          "[runtime][secret]") {
  scratch_dir dir;
  auto secret = run_secret::make();
  with_variable file{secret_file_variable,
                     written(dir, secret.to_hex() + "\n")};
  for (bool supervised : {false, true}) {
    auto got = given_secret(rank_of(supervised));
    REQUIRE(got);
    CHECK(got->to_hex() == secret.to_hex());
  }
}

TEST_CASE("a file of the secret that others can read is refused by name",
          "[runtime][secret]") {
  scratch_dir dir;
  auto text = run_secret::make().to_hex();
  for (::mode_t mode : {0640, 0604, 0660, 0644}) {
    auto path = written(dir, text, mode);
    CHECK_THAT(refusal(path), ContainsSubstring(path)
                                && ContainsSubstring("no one else can read"));
  }
  CHECK_THAT(refusal(dir.path), ContainsSubstring("must be a file"));
}

TEST_CASE("a file that holds no secret is refused, and not shown",
          "[runtime][secret]") {
  scratch_dir dir;
  CHECK_THAT(refusal(dir.path / "nothing"),
             ContainsSubstring("No such file") && ContainsSubstring("nothing"));
  for (auto& text : {std::string{}, std::string(63, 'a'), std::string(65, 'a'),
                     std::string(64, 'z'), std::string(100000, 'a')}) {
    auto path = written(dir, text);
    auto told = refusal(path);
    CHECK_THAT(told, ContainsSubstring(path)
                       && ContainsSubstring("64 hexadecimal digits"));
    CHECK_THAT(told, !ContainsSubstring("aaaa") && !ContainsSubstring("zzzz"));
  }
}
