#pragma once

// Everything a training program needs.

#include "runtime/autocast.hpp"
#include "runtime/delay_param_initialization.hpp"
#include "runtime/distributed_model.hpp"
#include "runtime/distributed_optimizer.hpp"
#include "runtime/init.hpp"
#include "runtime/random_stream.hpp"
#include "runtime/script_model.hpp"
#include "runtime/session.hpp"
#include "runtime/step.hpp"
#include "runtime/submodule.hpp"
#include "transport/error.hpp"
