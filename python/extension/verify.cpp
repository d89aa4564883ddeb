#include "python/extension/model.hpp"
#include "python/extension/python_module.hpp"
#include "python/extension/values.hpp"
#include "runtime/base/random_stream.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/model/module_walk.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/session.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/verify/apart.hpp"
#include "runtime/verify/pipeline_evidence.hpp"
#include "runtime/verify/reference_numbers.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace smp::python {

namespace {

using without_lock = py::call_guard<py::gil_scoped_release>;

using tensors_by_name = std::map<std::string, at::Tensor>;

/// One step over the ranks, and the same in one process on pp_rank 0.
class verification {
public:
  explicit verification(py::handle model)
    : model_(model_of(model)),
      rank_(session::current().internals()),
      pipeline_(rank_) {
    // nop
  }

  /// Before the step, or in it, at the partition. Collective.
  void begin() {
    pipeline_.begin(model_);
    before_ = by_name(model_.state_dict());
    gradients_before_ = by_name(model_.gradients());
    pipeline_.observe(true);
  }

  const tensors_by_name& before() const noexcept {
    return before_;
  }

  /// After the step, or instead of its end.
  void stop() {
    pipeline_.observe(false);
  }

  /// Collective.
  void end_step() {
    mine_.log = pipeline_.gather_log();
    mine_.gradients = by_name(model_.gradients());
    pipeline_.take_state(by_name(model_.state_dict()), mine_);
  }

  /// Runs the microbatches one after the other, on pp_rank 0.
  /// @param root of the plain model
  /// @param tensors its parameters and buffers, by their first names
  /// @param body see `run_step`
  void run_alone(python_module& root, tensors_by_name tensors,
                 const py::function& body, uint64_t microbatches) {
    auto walked = walk(root);
    reference_numbers::module_names names;
    for (auto& x : walked.modules)
      names.emplace(x.identity(), x.names.front());
    call_logger logger;
    tensors_ = std::move(tensors);
    microbatches_ = microbatches;
    begin_gradients();
    for (uint64_t m = 0; m < microbatches; ++m)
      pass(body, m, names, logger);
    end_gradients();
    theirs_.log = logger.take([&](const void* object) {
      auto i = names.find(object);
      return i == names.end() ? std::nullopt : std::optional{i->second};
    });
    // Code may have put other tensors into the slots of buffers.
    for (auto& x : walk(root).tensors)
      if (x.is_buffer)
        tensors_[x.names.front()] = x.tensor;
    pipeline_.take_state(tensors_, theirs_);
  }

  /// What `DistributedModel.backward` is in one process.
  void backward(const std::vector<at::Tensor>& outputs,
                const std::vector<std::optional<at::Tensor>>& grads,
                bool keep_graph) const {
    auto scale = loss_scale();
    if (rank_.config().average_grads_across_microbatches)
      scale /= static_cast<double>(microbatches_);
    std::vector<at::Tensor> seeds;
    for (size_t i = 0; i < outputs.size(); ++i) {
      check_plain(outputs[i]);
      at::NoGradGuard no_grad;
      auto& given = grads.at(i);
      seeds.push_back(given ? *given * scale
                            : at::full_like(outputs[i], scale));
    }
    torch::autograd::backward(outputs, seeds, keep_graph);
  }

  /// Collective.
  /// @returns whether both did the same; on rank 0 also what, in words
  /// @param inside modules within compiled code
  std::pair<bool, std::string> compare(std::set<std::string> inside) {
    verify_summary result;
    auto stats = session::current().last_step();
    result.steps = 1;
    result.replayed = stats.replayed;
    result.fell_back = stats.fell_back;
    result.ranks = size();
    result.replicas = dp_size();
    result.microbatches = microbatches_;
    result.requests = stats.requests;
    result.complete = true;
    if (rank_.pp_rank() == 0) {
      drop_unchanged_parameters();
      pipeline_.average_over_replicas(theirs_,
                                      rank_.config().broadcast_buffers);
      pipeline_.compare({.step = rank_.drawn_step(),
                         .microbatches = microbatches_,
                         .names = pipeline_.names(),
                         .pipeline = mine_,
                         .reference = theirs_,
                         .before = before_,
                         .allowed = allowed(),
                         .inside = std::move(inside)},
                        result);
      pipeline_.gather_findings(result);
    }
    pipeline_.share_differences(result);
    if (rank_.self() != rank_id{0})
      return {result.equal(), {}};
    return {result.equal(),
            to_text(result, "smp.set_partition places modules")};
  }

private:
  double loss_scale() const {
    return model_.state().loss_scale().value();
  }

  /// Steps add to gradients that are there.
  void begin_gradients() {
    at::NoGradGuard no_grad;
    for (auto& [name, g] : gradients_before_)
      if (auto i = tensors_.find(name); i != tensors_.end())
        i->second.mutable_grad() = g.to(i->second.scalar_type())
                                     .mul(loss_scale());
  }

  void end_gradients() {
    at::NoGradGuard no_grad;
    for (auto& [name, x] : tensors_)
      if (x.is_leaf() && x.grad().defined())
        theirs_.gradients.emplace(name, unscaled(x.grad(), loss_scale()));
  }

  void pass(const py::function& body, uint64_t microbatch,
            const reference_numbers::module_names& names, call_logger& logger) {
    auto made = body(microbatch).cast<py::tuple>();
    auto inputs = tensors_in(made[0]);
    auto seed = microbatch_seed(rank_.config().seed, rank_.drawn_step(),
                                data_rank(), microbatch);
    apart from_ranks{rank_context::current_device()};
    reference_numbers numbers{names};
    logger.set_microbatch(microbatch);
    numbers.start(seed, &logger);
    call_observer::set_current(&numbers);
    py::object result = made[1]();
    numbers.body_done(inputs, tensors_in(result));
    call_observer::set_current(nullptr);
    numbers.finish();
  }

  /// The optimizer updates them, not the step.
  void drop_unchanged_parameters() {
    for (auto& [name, x] : before_) {
      auto mine = mine_.parameters.find(name);
      auto theirs = theirs_.parameters.find(name);
      if (mine == mine_.parameters.end() || theirs == theirs_.parameters.end()
          || !mine->second.equal(x) || !theirs->second.equal(x))
        continue;
      mine_.parameters.erase(mine);
      theirs_.parameters.erase(theirs);
    }
  }

  /// Computing in fewer digits leaves fewer digits equal, as in autocast.
  tolerance allowed() const {
    tolerance result;
    for (auto& call : theirs_.log.calls)
      for (auto& x : call.results)
        if (x)
          result = wider(result,
                         tolerance_for(static_cast<c10::ScalarType>(x->dtype)));
    return result;
  }

  distributed_model_base& model_;
  rank_runtime& rank_;
  pipeline_evidence pipeline_;
  tensors_by_name before_, gradients_before_;
  step_evidence mine_, theirs_;
  /// Of the single process.
  tensors_by_name tensors_;
  uint64_t microbatches_ = 0;
};

} // namespace

void bind_verify(py::module_& m) {
  py::class_<verification>(m, "Verification")
    .def(py::init<py::handle>(), py::keep_alive<1, 2>())
    .def("begin", &verification::begin, without_lock{})
    .def_property_readonly("before", &verification::before)
    .def("end_step", &verification::end_step, without_lock{})
    .def("stop", &verification::stop)
    .def("run_alone", &verification::run_alone)
    .def("backward", &verification::backward, without_lock{})
    .def("compare", &verification::compare, without_lock{});
}

} // namespace smp::python
