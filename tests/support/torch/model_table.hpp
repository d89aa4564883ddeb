#pragma once

// The models of tests/support/torch/small_models.hpp as rows.

#include "tests/support/torch/models.hpp"
#include "tests/support/torch/small_models.hpp"

#include <string>
#include <vector>

namespace smp::test {

struct small_model {
  const char* what;
  std::vector<model_step> (*run)(const model_options&,
                                 const std::vector<Tensor>&);
  std::vector<std::string> (*differences)(const model_options&,
                                          const std::vector<Tensor>&,
                                          const std::vector<model_step>&);
  /// With arguments that are worth a file.
  bool keeps_much = false;
  /// Draws numbers, on a device those of the device.
  bool has_dropout = false;
};

template <template <template <class> class> class Impl>
small_model of(const char* what) {
  return {what, &run_ranks<Impl>, &differences<Impl>};
}

template <template <template <class> class> class Impl>
small_model large(const char* what) {
  auto result = of<Impl>(what);
  result.keeps_much = true;
  return result;
}

template <template <template <class> class> class Impl>
small_model drawing(const char* what) {
  auto result = large<Impl>(what);
  result.has_dropout = true;
  return result;
}

inline const std::vector<small_model> small_models = {
  large<branch>("a branch on a tensor"),
  of<early_exit>("an early exit from a loop over modules"),
  large<reused>("modules that are used again"),
  of<sometimes>("modules that are called never or only sometimes"),
  of<sizes>("sizes that differ between microbatches"),
  of<outputs>("outputs without use or without gradient"),
  of<integers>("inputs without gradient"),
  of<frozen>("frozen parameters"),
  drawing<teacher>("modules under no_grad inside of forward, with dropout"),
  large<in_place>("operations in place on arguments"),
  of<weight_argument>("a parameter as an argument of another rank's module"),
  drawing<nested>(
    "calls from rank to rank and back, with structured arguments"),
  large<norms>("batch norms see the microbatches in order, once"),
  of<counters>("results that depend on a buffer, and on what it was"),
};

} // namespace smp::test
