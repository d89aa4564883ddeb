#pragma once

#include "actors/inspection/entry_file.hpp"
#include "actors/inspection/inspection_port.hpp"
#include "actors/inspection/inspector.hpp"
#include "actors/protocol/flight_query.hpp"

#include <memory>

namespace smp {

/// An INSPECTOR and the port where clients query it. The INSPECTOR exists from
/// the start, as it must hear of all ranks; the port exists only after `open`.
class inspection_service {
public:
  inspection_service(caf::actor_system& system, inspector_config config);

  ~inspection_service();

  const inspector_actor& actor() const noexcept {
    return actor_;
  }

  /// @returns where clients can connect; the same on each call.
  /// @throws error (transport) if the port cannot be opened
  const inspection_entry& open();

private:
  inspection_port::bytes collect(inspection_question x);
  inspection_port::bytes collect(flight_query::kind x, uint64_t limit);

  caf::actor_system& system_;
  const uint64_t world_size_;
  inspector_actor actor_;
  inspection_entry entry_;
  std::unique_ptr<inspection_port> port_;
};

} // namespace smp
