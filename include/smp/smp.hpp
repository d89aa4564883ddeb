#pragma once

// Everything a training program needs.

#include "runtime/base/autocast.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/checkpoint/checkpoint.hpp"
#include "runtime/checkpoint/load_state_dict.hpp"
#include "runtime/intercept/submodule.hpp"
#include "runtime/launch/init.hpp"
#include "runtime/lazy/delay_param_initialization.hpp"
#include "runtime/model/tp_register.hpp"
#include "runtime/session/activation_checkpointing.hpp"
#include "runtime/session/adagrad.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/script_model.hpp"
#include "runtime/session/session.hpp"
#include "runtime/session/step.hpp"
#include "runtime/session/tensor_collectives.hpp"
#include "tp/cross_entropy.hpp"
#include "tp/functions.hpp"
#include "transport/error.hpp"
