#pragma once

// Modules made in the scope of delay_param_initialization, compared with the
// same made without.

#include "runtime/base/random_stream.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "tests/support/catch.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace smp::test {

using module_ptr = std::shared_ptr<torch::nn::Module>;

/// All parameters and buffers with their names.
inline std::vector<std::pair<std::string, at::Tensor>>
tensors_of(const torch::nn::Module& m) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (auto& x : m.named_parameters())
    result.emplace_back(x.key(), x.value());
  for (auto& x : m.named_buffers())
    result.emplace_back(x.key(), x.value());
  return result;
}

/// Says in words what is not the same in two tensors, "" if all is.
inline std::string metadata_difference(const at::Tensor& x,
                                       const at::Tensor& y) {
  std::ostringstream out;
  auto compare = [&out](const char* what, auto a, auto b) {
    if (a != b)
      out << what << ' ' << a << " is not " << b << "; ";
  };
  compare("sizes", x.sizes(), y.sizes());
  compare("strides", x.strides(), y.strides());
  compare("dtype", x.dtype(), y.dtype());
  compare("requires_grad", x.requires_grad(), y.requires_grad());
  compare("is_leaf", x.is_leaf(), y.is_leaf());
  compare("version", x._version(), y._version());
  return out.str();
}

inline bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  return x.sizes() == y.sizes() && x.dtype() == y.dtype()
         && x.contiguous()
              .view(-1)
              .view(torch::kByte)
              .equal(y.contiguous().view(-1).view(torch::kByte));
}

/// Makes a module twice, and the second time in the scope. All tensors must
/// come out alike, in whatever order they are made, and the generator must
/// stand at the same number at any time.
template <class F>
void check_same(const std::string& name, F make, size_t at_least = 1) {
  INFO(name);
  torch::manual_seed(5);
  module_ptr eager = make();
  auto generator = random_stream::of_default();
  auto expected = tensors_of(*eager);
  for (auto order : {"forward", "backward", "at once"}) {
    INFO(order);
    torch::manual_seed(5);
    module_ptr model;
    {
      delay_param_initialization scope;
      model = make();
    }
    CHECK(random_stream::of_default() == generator);
    auto tensors = tensors_of(*model);
    REQUIRE(tensors.size() == expected.size());
    size_t deferred = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto& [key, x] = tensors[i];
      INFO(key);
      CHECK(key == expected[i].first);
      CHECK(metadata_difference(x, expected[i].second) == "");
      deferred += is_deferred(x);
    }
    CHECK(deferred >= at_least);
    std::vector<at::Tensor> todo;
    for (auto& [key, x] : tensors)
      todo.push_back(x);
    if (order == std::string{"backward"})
      std::reverse(todo.begin(), todo.end());
    if (order == std::string{"at once"})
      initialise_deferred(todo);
    else
      for (auto& x : todo)
        initialise_deferred({x});
    CHECK(random_stream::of_default() == generator);
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto& [key, x] = tensors[i];
      INFO(key);
      CHECK(!is_deferred(x));
      CHECK(same_bits(x, expected[i].second));
      CHECK(metadata_difference(x, expected[i].second) == "");
    }
  }
}

template <class Holder, class... Ts>
module_ptr made(Ts&&... xs) {
  return Holder(std::forward<Ts>(xs)...).ptr();
}

/// A module whose constructor is any code.
struct custom_impl : torch::nn::Module {
  explicit custom_impl(const std::function<void(custom_impl&)>& f) {
    f(*this);
  }

  at::Tensor& parameter(const std::string& name, at::Tensor x) {
    return register_parameter(name, std::move(x));
  }

  at::Tensor& buffer(const std::string& name, at::Tensor x) {
    return register_buffer(name, std::move(x));
  }
};

inline void check_custom(const std::string& name,
                         const std::function<void(custom_impl&)>& f,
                         size_t at_least = 1) {
  check_same(
    name, [&f] { return std::make_shared<custom_impl>(f); }, at_least);
}

} // namespace smp::test
