#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace smp {

class running_call;

/// Runs LibTorch's engine in the backward phase of `ex`.
///
/// Autograd fails if a tensor that forward kept was changed in place since. If
/// another microbatch did that, it is not so where microbatches run one after
/// the other. LibTorch has no error type for it, so any error of the engine
/// itself counts as one that may go away then (see
/// `step_counters::failed_graphs`).
/// @throws error (user_code) that also names what the step changed in place
void run_engine(running_call& ex, const torch::autograd::edge_list& roots,
                const torch::autograd::variable_list& gradients,
                bool keep_graph);

/// From now on `take` is asked what an interpreter keeps of an error of the
/// engine, on the thread where that threw: LibTorch leaves Python's exception
/// there. It has to take it away, as other code runs on that thread next. Once,
/// before there are models.
/// @param take returns what it says; empty: it has none. May throw the `error`
///             that it stands for
void take_engine_errors(std::string (*take)()) noexcept;

} // namespace smp
