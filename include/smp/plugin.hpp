#pragma once

// Everything a library needs whose model smp-train loads (docs/plugin.md).

#include "runtime/train/plugin.hpp"
