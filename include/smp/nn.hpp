#pragma once

// Modules that tensor-parallel ranks share without being told, with the
// arguments of the paper, and what code can ask of parameters. Apart from
// smp.hpp, as they bring Torch's modules.

#include "runtime/nn/distributed.hpp"
#include "runtime/nn/lm_head.hpp"
#include "runtime/nn/transformer.hpp"
#include "runtime/session/distributed_parameters.hpp"
