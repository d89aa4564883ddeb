#pragma once

#include "tests/support/runs/train_dir.hpp"

#include <string>
#include <utility>
#include <vector>

namespace smp::test {

/// What a program said that looked at a run.
struct inspected {
  int code = 0;
  std::string output;
};

/// smp-inspect with the run "run" and these words.
inline inspected ask_run(const train_dir& dir, std::vector<std::string> words) {
  words.insert(words.begin(), {built_program("smp-inspect"), "run"});
  program x{std::move(words), dir.path};
  auto code = x.join();
  return {code, x.output()};
}

} // namespace smp::test
