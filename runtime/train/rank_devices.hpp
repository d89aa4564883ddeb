#pragma once

// Where the ranks of a run compute, and the memory of their devices.

#include "actors/protocol/run_status.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace smp {

class session;

/// Where a rank computes.
struct rank_place {
  uint64_t machine = 0; // in the order of their first ranks
  std::string host;     // its name
  uint64_t pp_rank = 0; // the number of its device in the partition
  std::string device = "cpu";
  uint64_t memory = 0; // bytes that the device has; 0 on the host
};

template <class Inspector>
bool inspect(Inspector& f, rank_place& x) {
  return f.object(x).fields(
    f.field("machine", x.machine), f.field("host", x.host),
    f.field("pp_rank", x.pp_rank), f.field("device", x.device),
    f.field("memory", x.memory));
}

/// By rank. Collective.
std::vector<rank_place> places_of_ranks(session& s);

/// @returns one line per machine and kind of device, such as "ranks 0-3 on
/// node1: cuda:0-3 (85.0 GB each)"; none for ranks on the host
std::vector<std::string> devices_text(const std::vector<rank_place>& by_rank);

/// Memory of the devices of all ranks, by way of a sum over ranks that a run
/// forms anyway.
class device_memory_sum {
public:
  /// For a run on the host: adds nothing.
  device_memory_sum() = default;

  /// @param by_rank the same on all ranks
  device_memory_sum(const session& s, std::vector<rank_place> by_rank);

  /// Appends what this rank holds now. Does not wait for the device.
  void add_to(std::vector<double>& summands) const;

  /// @param sums of what all ranks passed to `add_to`, which ends with it
  /// @returns what each rank holds; nothing if all ranks are on the host
  std::vector<device_status> read(const std::vector<double>& sums) const;

private:
  const session* session_ = nullptr;
  std::vector<rank_place> by_rank_; // empty: all ranks are on the host
};

} // namespace smp
