#include "runtime/base/mistakes.hpp"

namespace smp {

void mistakes::add(const std::string& name, const std::string& more) {
  static constexpr size_t max_length = 160;
  if (count_++ >= max_named)
    return;
  auto text = "'" + name + "'" + more;
  if (text.size() > max_length)
    text = text.substr(0, max_length) + "...";
  named_.push_back(std::move(text));
}

void mistakes::describe(std::string& result) const {
  if (count_ == 0)
    return;
  result += (result.empty() ? "" : ", ") + std::to_string(count_) + " " + what_
            + " (";
  for (size_t i = 0; i < named_.size(); ++i)
    result += (i == 0 ? "" : ", ") + named_[i];
  if (count_ > named_.size())
    result += " and " + std::to_string(count_ - named_.size()) + " more";
  result += ")";
}

std::string shape_text(c10::ArrayRef<int64_t> x) {
  std::string result;
  for (auto size : x)
    result += (result.empty() ? "" : ", ") + std::to_string(size);
  return "[" + result + "]";
}

} // namespace smp
