#pragma once

#include "transport/error.hpp"

#include <string>
#include <utility>

namespace smp {

/// @param x why the evaluation after the last step failed
/// @param model_file where the trained model is; empty: it is not saved
/// @returns an error that says what is not lost
inline failure failed_evaluation(failure x, const std::string& model_file) {
  auto saved = model_file.empty() ? std::string{}
                                  : " and its model is in " + model_file;
  x.text
    = "the evaluation after the last step failed, while the training is "
      "complete"
      + saved + ": " + std::move(x.text);
  return x;
}

} // namespace smp
