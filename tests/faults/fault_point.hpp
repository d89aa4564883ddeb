#pragma once

/// A place where a process that preloads smp_fault_point.so fails if its
/// environment says so; null in others.
extern "C" [[gnu::weak]] void smp_fault_point(const char* phase);
