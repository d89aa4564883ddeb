#include "tests/support/catch.hpp"

#include "transport/files/file_descriptor.hpp"

#include <fcntl.h>

using namespace smp;

namespace {

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

int open_one() {
  auto result = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  REQUIRE(result >= 0);
  return result;
}

} // namespace

TEST_CASE("a file descriptor is closed with its owner", "[transport]") {
  auto fd = open_one();
  {
    file_descriptor x{fd};
    CHECK(x);
    CHECK(x.get() == fd);
    CHECK(is_open(fd));
  }
  CHECK_FALSE(is_open(fd));
}

TEST_CASE("a file descriptor has one owner at a time", "[transport]") {
  auto fd = open_one();
  file_descriptor to;
  {
    file_descriptor from{fd};
    to = std::move(from);
    CHECK_FALSE(from);
  }
  CHECK(is_open(fd));
  file_descriptor last{std::move(to)};
  CHECK_FALSE(to);
  CHECK(last.get() == fd);
}

TEST_CASE("a file descriptor that takes another closes its own",
          "[transport]") {
  auto first = open_one();
  auto second = open_one();
  file_descriptor x{first};
  x.reset(second);
  CHECK_FALSE(is_open(first));
  CHECK(is_open(second));
  x = file_descriptor{};
  CHECK_FALSE(is_open(second));
}

TEST_CASE("a released file descriptor stays open", "[transport]") {
  auto fd = open_one();
  {
    file_descriptor x{fd};
    CHECK(x.release() == fd);
    CHECK(x.release() == -1);
  }
  CHECK(is_open(fd));
  file_descriptor close{fd};
}

TEST_CASE("a file that could not be opened is not a file descriptor",
          "[transport]") {
  file_descriptor x{::open("/nowhere/at/all", O_RDONLY)};
  CHECK_FALSE(x);
  CHECK(x.get() == -1);
}
