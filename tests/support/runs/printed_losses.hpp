#pragma once

#include <sstream>
#include <string>
#include <vector>

// What examples print.

namespace smp::test {

/// What lines such as "step 10: loss 2.184" say.
inline std::vector<double> losses_in(const std::string& output) {
  std::istringstream in{output};
  std::vector<double> losses;
  for (std::string line; std::getline(in, line);)
    if (auto at = line.find("loss "); line.starts_with("step "))
      losses.push_back(std::stod(line.substr(at + 5)));
  return losses;
}

/// Whether a run of an example printed a loss that fell.
inline bool learned(const std::string& output) {
  auto losses = losses_in(output);
  return losses.size() == 5 && losses.back() < 0.9 * losses.front();
}

} // namespace smp::test
