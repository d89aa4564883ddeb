#include "runtime/launch/secret_handover.hpp"

#include "runtime/files/errno_text.hpp"
#include "transport/error.hpp"
#include "transport/files/private_file.hpp"

#include <fmt/format.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <span>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace smp {

namespace {

std::optional<run_secret> secret_from_descriptor(const std::string& text) {
  auto fd = std::atoi(text.c_str());
  // One byte more, to refuse other files. All ranks share the position.
  std::array<std::byte, run_secret::size + 1> bytes;
  if (fd <= STDERR_FILENO
      || ::pread(fd, bytes.data(), bytes.size(), 0)
           != static_cast<ssize_t>(run_secret::size))
    return std::nullopt;
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return run_secret{std::span{bytes}.first<run_secret::size>()};
}

} // namespace

file_descriptor secret_descriptor(const run_secret& x) {
  file_descriptor result{::memfd_create("smp-secret", MFD_CLOEXEC)};
  if (!result
      || ::write(result.get(), x.bytes().data(), x.bytes().size())
           != static_cast<ssize_t>(x.bytes().size()))
    throw error{error_code::config,
                fmt::format("no memory file for the secret of the run: {}",
                            errno_text(errno))};
  return result;
}

std::optional<run_secret> given_secret(const rank_environment& x) {
  if (auto* text = std::getenv(secret_descriptor_variable);
      x.supervised && text != nullptr) {
    if (auto result = secret_from_descriptor(text))
      return result;
    throw config_error(fmt::format(
      "environment: {}={} is not a descriptor with the secret of the run; the "
      "program between smp's launcher and the ranks must leave it open",
      secret_descriptor_variable, text));
  }
  auto* path = std::getenv(secret_file_variable);
  if (path == nullptr || *path == '\0') {
    if (!x.supervised)
      return std::nullopt;
    throw config_error(fmt::format(
      "environment: SMP_RENDEZVOUS is set, but neither {} nor {}: a "
      "process that joins a run has to show its secret",
      secret_descriptor_variable, secret_file_variable));
  }
  auto content = read_private_file(path);
  if (!content)
    throw config_error(fmt::format("{}: cannot be read: {} ({})", path,
                                   std::strerror(errno), secret_file_variable));
  if (auto result = run_secret::from_hex(*content))
    return result;
  throw config_error(fmt::format(
    "{}: needs {} hexadecimal digits, as from openssl rand -hex {} "
    "({})",
    path, 2 * run_secret::size, run_secret::size, secret_file_variable));
}

} // namespace smp
