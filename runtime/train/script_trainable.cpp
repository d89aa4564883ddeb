#include "runtime/train/script_trainable.hpp"

#include "runtime/intercept/script/marks.hpp"
#include "runtime/intercept/script/script_calls.hpp"
#include "runtime/model/script_walk.hpp"
#include "runtime/session/script_model.hpp"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/version.h>

#include <algorithm>

#include <dlfcn.h>

namespace smp {

namespace {

class script_trainable : public trainable {
public:
  explicit script_trainable(const std::string& path)
    : path_(path), module_(load_script(path)) {
    module_.train(true);
  }

  named_tensors named_parameters() const override {
    return tensors([](const walked_tensor& x) { return !x.is_buffer; });
  }

  named_tensors named_buffers() const override {
    return tensors(
      [](const walked_tensor& x) { return x.is_buffer && !x.is_attribute; });
  }

  std::unordered_map<const void*, std::string> module_paths() const override {
    std::unordered_map<const void*, std::string> result;
    for (auto& x : walk(module_._ivalue()).modules)
      result.emplace(x.identity(), x.names.front());
    return result;
  }

  bool make_observable() override {
    // The interpreter calls methods by itself: only rewritten code reports.
    program_ = std::make_unique<script_program>(walk(module_._ivalue()), 1);
    return false;
  }

  void mark_calls() override {
    mark_methods(classes_of(walk(module_._ivalue())));
  }

  void train(bool on) override {
    module_.train(on);
  }

  void check_inputs(size_t tensors) const override {
    auto& schema = module_.get_method("forward").function().getSchema();
    auto& arguments = schema.arguments(); // the first is the module
    auto required = std::count_if(arguments.begin(), arguments.end(),
                                  [](auto& y) { return !y.default_value(); });
    if (tensors + 1 < static_cast<size_t>(required)
        || tensors + 1 > arguments.size())
      throw error{error_code::config,
                  fmt::format("the forward of '{}' takes {} tensors, but the "
                              "data has {}",
                              path_, required - 1, tensors)};
  }

  at::Tensor loss(const batch& x) override {
    check_inputs(x.size());
    auto result = loss_of(
      run_method(module_._ivalue(), "forward", {x.begin(), x.end()}));
    if (result.numel() != 1)
      throw error{error_code::config,
                  fmt::format("the forward of '{}' returned {} numbers instead "
                              "of its loss",
                              path_, result.numel())};
    return result;
  }

  bool continues_text() const override {
    return false;
  }

  at::Tensor logits(const at::Tensor&) override {
    throw error{error_code::unsupported, "a TorchScript file has no logits"};
  }

  std::unique_ptr<distributed_model_base> distribute() override {
    return std::make_unique<distributed_model<torch::jit::Module>>(module_);
  }

private:
  template <class Predicate>
  named_tensors tensors(Predicate wanted) const {
    named_tensors result;
    for (auto& x : walk(module_._ivalue()).tensors)
      if (wanted(x))
        result.emplace_back(x.names.front(), x.tensor);
    return result;
  }

  std::string path_;
  torch::jit::Module module_;
  std::unique_ptr<script_program> program_;
};

/// The library registers its operators while it is loaded. It is never closed.
void load_operators(const std::string& library) {
  auto refuse = [&library](const std::string& why) {
    throw error{
      error_code::config,
      fmt::format("model.operator_libraries: \"{}\" cannot be loaded: "
                  "{}; if it misses a symbol, build it with the "
                  "LibTorch of this smp ({})",
                  library, why, TORCH_VERSION)};
  };
  try {
    if (::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr)
      refuse(::dlerror());
  } catch (const c10::Error& e) { // an operator that exists already
    refuse(e.what_without_backtrace());
  }
}

} // namespace

std::unique_ptr<trainable>
make_script_trainable(const std::string& path,
                      const std::vector<std::string>& libraries) {
  for (auto& x : libraries)
    load_operators(x);
  return std::make_unique<script_trainable>(path);
}

} // namespace smp
