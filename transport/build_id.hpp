#pragma once

namespace smp {

/// Ranks of two different builds would misread each other's messages, so they
/// compare this string when they meet: version, revision, compiler, and the
/// versions of LibTorch, UCX and CAF.
const char* build_id() noexcept;

} // namespace smp
