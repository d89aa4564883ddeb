#include "runtime/optimizer/optimizer_state.hpp"

#include "runtime/optimizer/foreign_optimizer.hpp"
#include "transport/error.hpp"

#include <ATen/EmptyTensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <tuple>
#include <type_traits>

namespace smp {

namespace optim = torch::optim;

namespace {

// -- states -------------------------------------------------------------------

template <class F>
void each_field(optim::SGDParamState& x, F f) {
  f("momentum_buffer", x.momentum_buffer());
}

template <class State, class F>
void each_field_of_adam(State& x, F f) {
  f("step", x.step());
  f("exp_avg", x.exp_avg());
  f("exp_avg_sq", x.exp_avg_sq());
  f("max_exp_avg_sq", x.max_exp_avg_sq());
}

template <class F>
void each_field(optim::AdamParamState& x, F f) {
  each_field_of_adam(x, f);
}

template <class F>
void each_field(optim::AdamWParamState& x, F f) {
  each_field_of_adam(x, f);
}

template <class F>
void each_field(optim::AdagradParamState& x, F f) {
  f("step", x.step());
  f("sum", x.sum());
}

template <class F>
void each_field(optim::RMSpropParamState& x, F f) {
  f("step", x.step());
  f("square_avg", x.square_avg());
  f("momentum_buffer", x.momentum_buffer());
  f("grad_avg", x.grad_avg());
}

// -- options ------------------------------------------------------------------

template <class F>
void each_option(optim::SGDOptions& x, F f) {
  f("lr", x.lr());
  f("momentum", x.momentum());
  f("dampening", x.dampening());
  f("weight_decay", x.weight_decay());
  f("nesterov", x.nesterov());
}

template <class Options, class F>
void each_option_of_adam(Options& x, F f) {
  f("lr", x.lr());
  f("beta1", std::get<0>(x.betas()));
  f("beta2", std::get<1>(x.betas()));
  f("eps", x.eps());
  f("weight_decay", x.weight_decay());
  f("amsgrad", x.amsgrad());
}

template <class F>
void each_option(optim::AdamOptions& x, F f) {
  each_option_of_adam(x, f);
}

template <class F>
void each_option(optim::AdamWOptions& x, F f) {
  each_option_of_adam(x, f);
}

template <class F>
void each_option(optim::AdagradOptions& x, F f) {
  f("lr", x.lr());
  f("lr_decay", x.lr_decay());
  f("weight_decay", x.weight_decay());
  f("initial_accumulator_value", x.initial_accumulator_value());
  f("eps", x.eps());
}

template <class F>
void each_option(optim::RMSpropOptions& x, F f) {
  f("lr", x.lr());
  f("alpha", x.alpha());
  f("eps", x.eps());
  f("weight_decay", x.weight_decay());
  f("momentum", x.momentum());
  f("centered", x.centered());
}

// -- types --------------------------------------------------------------------

template <class State, class Options>
struct kind {
  using state = State;
  using options = Options;
  const char* name;
};

/// Calls `f` with the kind of `x`. (None of these classes is another one.)
template <class F>
auto with_kind(optim::Optimizer& x, F f) {
  if (dynamic_cast<optim::SGD*>(&x) != nullptr)
    return f(kind<optim::SGDParamState, optim::SGDOptions>{"SGD"});
  if (dynamic_cast<optim::Adam*>(&x) != nullptr)
    return f(kind<optim::AdamParamState, optim::AdamOptions>{"Adam"});
  if (dynamic_cast<optim::AdamW*>(&x) != nullptr)
    return f(kind<optim::AdamWParamState, optim::AdamWOptions>{"AdamW"});
  if (dynamic_cast<optim::Adagrad*>(&x) != nullptr)
    return f(kind<optim::AdagradParamState, optim::AdagradOptions>{"Adagrad"});
  if (dynamic_cast<optim::RMSprop*>(&x) != nullptr)
    return f(kind<optim::RMSpropParamState, optim::RMSpropOptions>{"RMSprop"});
  throw error{error_code::unsupported,
              "checkpoints know SGD, Adam, AdamW, Adagrad and RMSprop; what "
              "another optimizer remembers cannot be saved"};
}

/// Calls `f` with each field if it is such a state.
template <class State, class F>
void each_field_of(optim::OptimizerParamState& x, F f) {
  if (auto* state = dynamic_cast<State*>(&x))
    each_field(*state, f);
}

template <class T>
inline constexpr bool is_tensor = std::is_same_v<T, at::Tensor>;

at::Tensor tensor_of(int64_t x) {
  at::Tensor result = at::detail::empty_cpu({}, at::kLong);
  *result.mutable_data_ptr<int64_t>() = x;
  return result;
}

} // namespace

std::string type_of(optim::Optimizer& x) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->type();
  return with_kind(x, [](auto kind) { return std::string{kind.name}; });
}

std::map<std::string, double> options_of(optim::Optimizer& x,
                                         optim::OptimizerOptions& group) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->options_of(group);
  std::map<std::string, double> result;
  with_kind(x, [&](auto kind) {
    auto& options = static_cast<typename decltype(kind)::options&>(group);
    each_option(options, [&](const char* name, auto& value) {
      result.emplace(name, static_cast<double>(value));
    });
  });
  return result;
}

void set_options(optim::Optimizer& x, optim::OptimizerOptions& group,
                 const std::map<std::string, double>& values) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->set_options(group, values);
  with_kind(x, [&](auto kind) {
    auto& options = static_cast<typename decltype(kind)::options&>(group);
    each_option(options, [&](const char* name, auto& value) {
      if (auto i = values.find(name); i != values.end())
        value = static_cast<std::remove_reference_t<decltype(value)>>(
          i->second);
    });
  });
}

std::vector<state_field> state_fields(optim::Optimizer& x) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->state_fields();
  std::vector<state_field> result;
  with_kind(x, [&](auto kind) {
    typename decltype(kind)::state none;
    each_field(none, [&]<class T>(const char* name, T&) {
      result.push_back({name, !is_tensor<T>});
    });
  });
  return result;
}

named_tensors state_of(optim::Optimizer& x, const at::Tensor& parameter) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->state_of(parameter);
  named_tensors result;
  auto found = x.state().find(parameter.unsafeGetTensorImpl());
  if (found == x.state().end())
    return result;
  with_kind(x, [&](auto kind) {
    auto& state = static_cast<typename decltype(kind)::state&>(*found->second);
    each_field(state, [&](const char* name, auto& value) {
      if constexpr (is_tensor<std::remove_reference_t<decltype(value)>>) {
        if (value.defined())
          result.emplace_back(name, value);
      } else {
        result.emplace_back(name, tensor_of(value));
      }
    });
  });
  return result;
}

void set_state(optim::Optimizer& x, const at::Tensor& parameter,
               const named_tensors& state) {
  if (auto* y = dynamic_cast<foreign_optimizer*>(&x))
    return y->set_state(parameter, state);
  auto* key = parameter.unsafeGetTensorImpl();
  if (state.empty()) {
    x.state().erase(key);
    return;
  }
  std::map<std::string, at::Tensor> fields{state.begin(), state.end()};
  with_kind(x, [&](auto kind) {
    auto made = std::make_unique<typename decltype(kind)::state>();
    each_field(*made, [&](const char* name, auto& value) {
      auto i = fields.find(name);
      if (i == fields.end())
        return;
      if constexpr (is_tensor<std::remove_reference_t<decltype(value)>>)
        value = i->second.to(parameter.device());
      else
        value = *i->second.template const_data_ptr<int64_t>();
    });
    x.state()[key] = std::move(made);
  });
}

void move_state(optim::Optimizer& x, const at::Tensor& from,
                const at::Tensor& to) {
  auto found = x.state().find(from.unsafeGetTensorImpl());
  if (found == x.state().end())
    return;
  auto state = std::move(found->second);
  x.state().erase(found);
  auto move = [&](const char*, auto& value) {
    if constexpr (is_tensor<std::remove_reference_t<decltype(value)>>)
      if (value.defined())
        value = value.to(to.device());
  };
  each_field_of<optim::SGDParamState>(*state, move);
  each_field_of<optim::AdamParamState>(*state, move);
  each_field_of<optim::AdamWParamState>(*state, move);
  each_field_of<optim::AdagradParamState>(*state, move);
  each_field_of<optim::RMSpropParamState>(*state, move);
  x.state()[to.unsafeGetTensorImpl()] = std::move(state);
}

} // namespace smp
