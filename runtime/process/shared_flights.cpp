#include "runtime/process/shared_flights.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <span>

#include <sys/mman.h>

namespace smp {

namespace {

std::shared_ptr<std::byte> map_record(int fd, uint64_t local_rank) {
  auto size = flight_record::image_size();
  auto* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                   static_cast<off_t>(local_rank * size));
  if (p == MAP_FAILED)
    return nullptr;
  return {static_cast<std::byte*>(p),
          [size](std::byte* x) { ::munmap(x, size); }};
}

/// @returns null if no launcher of ours keeps the record of this process
std::shared_ptr<std::byte> inherited_memory() {
  auto* fd = std::getenv(flight_descriptor_variable);
  auto* slot = std::getenv("SMP_LOCAL_RANK");
  if (fd == nullptr || slot == nullptr)
    return nullptr;
  return map_record(std::atoi(fd), static_cast<uint64_t>(std::atoll(slot)));
}

} // namespace

file_descriptor flight_descriptor(uint64_t ranks) {
  file_descriptor result{::memfd_create("smp-flight", MFD_CLOEXEC)};
  auto size = static_cast<off_t>(ranks * flight_record::image_size());
  if (!result || ::ftruncate(result.get(), size) != 0)
    return {};
  return result;
}

std::shared_ptr<flight_record> make_flight_record(rank_id self) {
  if (auto memory = inherited_memory())
    return std::make_shared<flight_record>(self, std::move(memory));
  return std::make_shared<flight_record>(self);
}

std::string flight_path(const std::string& run_dir, rank_id x) {
  return fmt::format("{}/flight-{}", run_dir, x.value);
}

std::string write_flight(const std::string& run_dir, rank_id x,
                         std::span<const std::byte> image) {
  auto path = flight_path(run_dir, x);
  auto parts = path + ".part";
  {
    std::ofstream out{parts, std::ios::binary};
    out.write(reinterpret_cast<const char*>(image.data()),
              static_cast<std::streamsize>(image.size()));
    if (!out.flush()) {
      auto why = std::strerror(errno);
      std::remove(parts.c_str());
      return fmt::format("{}: {}", path, why);
    }
  }
  if (std::rename(parts.c_str(), path.c_str()) != 0)
    return fmt::format("{}: {}", path, std::strerror(errno));
  return {};
}

std::string write_flights(const std::string& run_dir, int fd,
                          rank_id first_rank, uint64_t ranks) {
  std::string result;
  for (uint64_t i = 0; fd >= 0 && i < ranks; ++i) {
    auto memory = map_record(fd, i);
    if (!memory)
      continue;
    auto image = flight_record::image_of(memory.get());
    if (image.empty())
      continue;
    auto why = write_flight(run_dir, {first_rank.value + i}, image);
    if (result.empty())
      result = why;
  }
  return result;
}

} // namespace smp
