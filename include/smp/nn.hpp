#pragma once

// Modules that tensor-parallel ranks share automatically, with the arguments of
// the paper, and queries of parameters. Separate from smp.hpp, because they
// include Torch's modules.

#include "runtime/nn/distributed.hpp"
#include "runtime/nn/lm_head.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/session/distributed_parameters.hpp"
