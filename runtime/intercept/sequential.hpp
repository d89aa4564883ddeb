#pragma once

// A Sequential is intercepted without changing its class: its children are
// already type-erased, so each gets a wrapper around its erased `forward`.
// Consecutive children on one rank become one request (R8).

#include "runtime/calls/invoker.hpp"
#include "transport/ids.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace torch::nn {
class SequentialImpl;
} // namespace torch::nn

namespace smp {

class running_call;
struct hook_state;
struct model_context;

/// Wraps the children of `x` that are not wrapped yet. After that
/// `x->at<T>(i)` no longer finds the type T; `x->ptr(i)` and `named_children`
/// are as before.
/// @returns the hooks of the children, by position
std::vector<hook_state*> intercept_children(torch::nn::SequentialImpl& x);

/// Lets a `call_observer` see the children's calls in a model without a
/// session, which must not contain anything that makes a call remote (R36).
void observe_children(torch::nn::SequentialImpl& x);

/// Gives the wrappers of `x` the id that it has in `model`; call after the
/// partition.
void name_sequential(torch::nn::SequentialImpl& x, module_id id,
                     const std::shared_ptr<model_context>& model);

/// Runs children [first, last) on this rank, their owner.
/// @param served another rank requested it
/// @throws error (protocol) if `object` is not a Sequential with these children
invocation run_range(torch::nn::Module& object, uint32_t first, uint32_t last,
                     bool served, unpacker& in, const std::vector<value>& args,
                     packer& out);

/// A range that was handed over must be consumed by `Sequential::forward`.
/// @throws error (unsupported) if the user's own loop over the children stopped
/// early
void check_range_consumed(running_call& ex);

} // namespace smp
