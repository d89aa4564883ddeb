#pragma once

#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

namespace smp::test {

/// Sends stderr to a file while it lives.
class stderr_to {
public:
  explicit stderr_to(const std::filesystem::path& path) : saved_(::dup(2)) {
    auto file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(file, 2);
    ::close(file);
  }

  ~stderr_to() {
    ::dup2(saved_, 2);
    ::close(saved_);
  }

  stderr_to(const stderr_to&) = delete;
  stderr_to& operator=(const stderr_to&) = delete;

private:
  int saved_;
};

} // namespace smp::test
