#pragma once

// Everything that a library with a model for smp-train needs (docs/plugin.md).

#include "runtime/train/plugin.hpp"
