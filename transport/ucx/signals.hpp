#pragma once

namespace smp {

/// UCX takes SIGHUP for a debugger when its library is loaded, before main. As
/// if it had not: ignored if that was inherited (nohup), otherwise the default.
/// Call before threads are started.
void restore_hangup();

} // namespace smp
