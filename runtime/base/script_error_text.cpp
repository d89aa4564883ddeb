#include "runtime/base/script_error_text.hpp"

namespace smp {

std::string script_error_text(const std::string& x) {
  if (x.find("TorchScript") == std::string::npos)
    return x;
  auto last_line_with = [&x](const std::string& part) {
    auto i = x.rfind(part);
    if (i == std::string::npos)
      return std::string{};
    auto begin = x.rfind('\n', i);
    begin = begin == std::string::npos ? 0 : begin + 1;
    auto end = x.find('\n', i);
    auto line = x.substr(begin, end - begin);
    line.erase(0, line.find_first_not_of(' '));
    return line;
  };
  auto cause = x.rfind("Error: ");
  if (cause == std::string::npos)
    return x;
  cause = x.rfind('\n', cause);
  auto text = x.substr(cause == std::string::npos ? 0 : cause + 1);
  while (!text.empty() && text.back() == '\n')
    text.pop_back();
  if (auto place = last_line_with("File \""); !place.empty())
    text += " (" + place + ")";
  return text;
}

} // namespace smp
