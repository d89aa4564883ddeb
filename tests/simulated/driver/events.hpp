#pragma once

#include <cstdint>
#include <memory>

namespace smp::sim {

class event_state;

/// A point of a stream that other streams and the host can wait for. Who waits
/// means the last record before; an event that nobody has recorded is done.
using event = std::shared_ptr<event_state>;

event make_event();

void record(const event&, int device, int64_t stream);

/// The stream waits, not the caller.
void wait(const event&, int device, int64_t stream);

bool done(const event&);

/// The caller waits.
void synchronize(const event&);

/// Between when both were reached.
double elapsed_ms(const event& from, const event& to);

// -- for other processes of the same user -------------------------------------

/// Plain bytes.
struct event_handle {
  int32_t process;
  int32_t file;
};

/// Only such an event can be exported.
event make_shared_event();

event_handle export_event(const event&);

/// The exporting process must still live.
event import_event(const event_handle&);

} // namespace smp::sim
