#pragma once

#include "actors/inspection/entry_file.hpp"
#include "actors/inspection/inspection_port.hpp"
#include "actors/inspection/inspector.hpp"

#include <memory>

namespace smp {

/// An INSPECTOR and the port where clients ask it. The INSPECTOR is there from
/// the begin, as it has to hear of the ranks; the port from `open` on.
class inspection_service {
public:
  inspection_service(caf::actor_system& system, inspector_config config);

  ~inspection_service();

  const inspector_actor& actor() const noexcept {
    return actor_;
  }

  /// @returns where clients may ask; the same each time.
  /// @throws error (transport) if nothing can listen
  const inspection_entry& open();

private:
  inspection_port::bytes collect();

  caf::actor_system& system_;
  inspector_actor actor_;
  inspection_entry entry_;
  std::unique_ptr<inspection_port> port_;
};

} // namespace smp
