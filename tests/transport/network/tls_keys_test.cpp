#include "tests/support/catch.hpp"

#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/network/tls_keys.hpp"

#include <filesystem>

#include <sys/stat.h>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

struct keys_dir : scratch_dir {
  keys_dir() : dir(path / "keys") {
    make_keys(dir);
  }

  std::string refusal() const {
    return error_of([&] { tls_keys{dir}; }, error_code::config);
  }

  void set_mode(const std::string& file, mode_t mode) const {
    REQUIRE(::chmod((dir + file).c_str(), mode) == 0);
  }

  std::string dir;
};

mode_t mode_of(const std::string& path) {
  struct stat info {};
  REQUIRE(::stat(path.c_str(), &info) == 0);
  return info.st_mode & 0777;
}

/// Valid in 2020, made by openssl ca.
constexpr const char* of_2020 = R"(-----BEGIN CERTIFICATE-----
MIIBADCBpgIBATAKBggqhkjOPQQDAjAMMQowCAYDVQQDDAF4MB4XDTIwMDEwMTAw
MDAwMFoXDTIxMDEwMTAwMDAwMFowDDEKMAgGA1UEAwwBeDBZMBMGByqGSM49AgEG
CCqGSM49AwEHA0IABK92AIPF3OuFHwosm5+5hKcsiGbbBm2BMzpXy4IUeKG1/VCK
dDvluDnfOHjnomTIUHhbgvP00BrPvf4S3PyjlLYwCgYIKoZIzj0EAwIDSQAwRgIh
ALtoeuIGvC4upZLSmFlLwb8rRuD4fvDl5i+xjByLMPnuAiEArHvZTKz+GiPhgOdx
w3/Own21NWrwj2pdS1DKP1fbaGE=
-----END CERTIFICATE-----
)";

/// Valid in 2400.
constexpr const char* of_2400 = R"(-----BEGIN CERTIFICATE-----
MIIBBDCBqgIBAjAKBggqhkjOPQQDAjAMMQowCAYDVQQDDAF4MCIYDzI0MDAwMTAx
MDAwMDAwWhgPMjQwMTAxMDEwMDAwMDBaMAwxCjAIBgNVBAMMAXgwWTATBgcqhkjO
PQIBBggqhkjOPQMBBwNCAASvdgCDxdzrhR8KLJufuYSnLIhm2wZtgTM6V8uCFHih
tf1QinQ75bg53zh456JkyFB4W4Lz9NAaz73+Etz8o5S2MAoGCCqGSM49BAMCA0kA
MEYCIQDImYhe7YUZNEJhqkg6Lnl1Dw8S+Bm5K/Jya9oQFF3w5AIhAL4UpLUY/m8s
0OjTU4MoZ8+Fu2jEWW6yIYdw0/GhNRhp
-----END CERTIFICATE-----
)";

} // namespace

TEST_CASE_METHOD(keys_dir, "the keys of a run are for their user only",
                 "[transport][tls]") {
  CHECK(refusal() == "no error");
  CHECK(mode_of(dir) == 0700);
  for (auto& file : std::filesystem::directory_iterator{dir})
    CHECK(mode_of(file.path()) == 0600);
  // Nobody can make more of them: the key of the authority is gone.
  size_t keys = 0;
  for (auto& file : std::filesystem::directory_iterator{dir})
    keys += content_of(file.path()).find("PRIVATE KEY") != std::string::npos;
  CHECK(keys == 1);
}

TEST_CASE_METHOD(keys_dir, "keys that others can read are refused by name",
                 "[transport][tls]") {
  SECTION("the folder") {
    auto mode = GENERATE(0750, 0701, 0770);
    set_mode("", static_cast<mode_t>(mode));
    CHECK_THAT(refusal(), ContainsSubstring("chmod 700 " + dir));
  }
  SECTION("the key") {
    auto mode = GENERATE(0640, 0604, 0620);
    set_mode("/rank.key", static_cast<mode_t>(mode));
    CHECK_THAT(refusal(), ContainsSubstring("chmod 600 " + dir + "/rank.key"));
  }
}

TEST_CASE_METHOD(keys_dir, "what is not a key is refused by name",
                 "[transport][tls]") {
  for (auto file : {"ca.pem", "rank.pem", "rank.key"}) {
    auto before = content_of(dir + '/' + file);
    write("keys/" + std::string{file}, "nothing of use\n");
    CHECK_THAT(refusal(), ContainsSubstring(dir + '/' + file));
    std::filesystem::remove(dir + '/' + file);
    CHECK_THAT(refusal(), ContainsSubstring("smp-train keys"));
    write("keys/" + std::string{file}, before);
    set_mode("/" + std::string{file}, 0600);
  }
  CHECK(refusal() == "no error");
  CHECK_THAT(error_of([&] { tls_keys{dir + "-nowhere"}; }, error_code::config),
             ContainsSubstring("smp-train keys"));
}

TEST_CASE_METHOD(keys_dir, "a pipe among the keys is refused, not awaited",
                 "[transport][tls]") {
  for (auto file : {"ca.pem", "rank.pem", "rank.key"}) {
    auto path = dir + '/' + file;
    auto before = content_of(path);
    std::filesystem::remove(path);
    REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
    CHECK_THAT(refusal(), ContainsSubstring(path + ": is not a regular file"));
    std::filesystem::remove(path);
    write("keys/" + std::string{file}, before);
    set_mode("/" + std::string{file}, 0600);
  }
}

TEST_CASE_METHOD(keys_dir, "keys that are not valid now are refused by date",
                 "[transport][tls]") {
  write("keys/rank.pem", of_2020);
  CHECK_THAT(refusal(),
             ContainsSubstring(dir
                               + "/rank.pem: expired on Jan  1 00:00:00 "
                                 "2021 GMT; make new keys in another "
                                 "folder"));
  write("keys/rank.pem", of_2400);
  CHECK_THAT(refusal(), ContainsSubstring("/rank.pem: is valid only from Jan  "
                                          "1 00:00:00 2400 GMT"));
}

TEST_CASE_METHOD(keys_dir, "a key belongs to its certificate",
                 "[transport][tls]") {
  auto other = (path / "other").string();
  make_keys(other);
  write("keys/rank.key", content_of(other + "/rank.key"));
  set_mode("/rank.key", 0600);
  CHECK_THAT(refusal(), ContainsSubstring("do not belong together"));
}

TEST_CASE_METHOD(keys_dir, "keys are never overwritten", "[transport][tls]") {
  auto before = content_of(dir + "/rank.key");
  CHECK_THAT(error_of([&] { make_keys(dir); }, error_code::config),
             ContainsSubstring("already"));
  CHECK(content_of(dir + "/rank.key") == before);
}
