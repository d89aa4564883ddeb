#include "tests/simulated/backend/operator_call.hpp"

#include "tests/simulated/backend/copies.hpp"
#include "tests/simulated/backend/creation.hpp"
#include "tests/simulated/backend/generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <set>
#include <string>

namespace smp::sim {

namespace {

using c10::IValue;

at::Tensor first_of_ours(c10::ArrayRef<IValue> arguments) {
  at::Tensor found;
  for (const auto& x : arguments)
    map_tensors(x, [&](const at::Tensor& t) {
      if (!found.defined() && is_ours(t))
        found = t;
      return t;
    });
  return found;
}

/// On a GPU, too, indices may be on the host.
bool takes_host_indices(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("aten::index")
         || schema.name().starts_with("aten::_index");
}

/// @param length as in result_shapes
size_t number_of_tensors(int64_t length) {
  if (length < 0)
    return length == one_tensor ? 1 : 0;
  return static_cast<size_t>(length);
}

bool is_written(const c10::AliasInfo* x) {
  return x != nullptr && x->isWrite();
}

// -- meta kernels -------------------------------------------------------------

/// Half of the operators have none in C++, which shows only by an exception,
/// and that costs much.
class operators_without_meta {
public:
  bool contains(const std::string& name) {
    std::lock_guard guard{mutex_};
    return names_.contains(name);
  }

  void add(const std::string& name) {
    std::lock_guard guard{mutex_};
    names_.insert(name);
  }

private:
  std::mutex mutex_;
  std::set<std::string> names_;
};

operators_without_meta& without_meta() {
  static auto* const only = new operators_without_meta;
  return *only;
}

at::Tensor meta_of(const at::Tensor& x) {
  return at::Tensor{
    at::detail::empty_strided_meta(x.sizes(), x.strides(), x.scalar_type())};
}

bool runs_on_meta(const c10::OperatorHandle& op, value_stack& arguments) {
  auto name = toString(op.operator_name());
  if (without_meta().contains(name))
    return false;
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet{c10::DispatchKey::Meta}, &arguments);
    return true;
  } catch (const c10::NotImplementedError&) {
    without_meta().add(name);
    return false;
  } catch (const c10::IndexError&) {
    // It looks at the first row of what is added, where there may be none.
    if (op.schema().name() != "aten::index_add")
      throw;
    return false;
  }
}

} // namespace

// -- results ------------------------------------------------------------------

void call_results::fill(const std::vector<at::Tensor>& made,
                        const char* name) const {
  for (const auto& [position, to] : targets) {
    TORCH_CHECK(position < made.size() && made[position].sizes() == to.sizes()
                  && made[position].dtype() == to.dtype(),
                "sim: ", name, " gave another shape than expected");
    to.copy_(made[position]);
  }
}

at::Tensor make_tensor(const at::Tensor& on, const shape& x) {
  return empty_strided(x.sizes, x.strides, x.dtype, {}, on.device(), {});
}

// -- the call -----------------------------------------------------------------

operator_call::operator_call(const c10::OperatorHandle& op,
                             c10::ArrayRef<IValue> arguments)
  : op_(op), arguments_(arguments), on_(first_of_ours(arguments)) {
  TORCH_CHECK(on_.defined(), "sim: no tensor on a device for ", name());
  take_arguments();
}

void operator_call::take_arguments() {
  cpu_.clear();
  accesses_.clear();
  grows_ = false;
  twins twin_of;
  for (size_t i = 0; i < arguments_.size(); ++i)
    cpu_.push_back(taken(schema().arguments()[i], arguments_[i], twin_of));
}

IValue operator_call::taken(const c10::Argument& argument, const IValue& x,
                            twins& twin_of) {
  auto draws = op_.hasTag(at::Tag::nondeterministic_seeded)
               && argument.name() == "generator";
  if (x.isGenerator() || (x.isNone() && draws))
    return engine_for(x);
  if (x.isDevice())
    return c10::Device{c10::kCPU};
  auto write = is_written(argument.alias_info());
  return map_tensors(
    x, [&](const at::Tensor& t) { return taken(t, write, twin_of); });
}

at::Tensor operator_call::taken(const at::Tensor& x, bool write,
                                twins& twin_of) {
  auto allowed = is_ours(x)
                   ? x.device() == on_.device()
                   : !write && (x.dim() == 0 || takes_host_indices(schema()));
  TORCH_CHECK(allowed, name(),
              ": Expected all tensors to be on the same device, but found at "
              "least two devices, ",
              on_.device(), " and ", x.device());
  if (!is_ours(x))
    return x.clone();
  accesses_.push_back(touching(x, write));
  if (!write || x.numel() > 0)
    return twin_of(x);
  grows_ = true;
  return at::empty({0}, x.options().device(c10::kCPU));
}

IValue operator_call::engine_for(const IValue& generator) const {
  auto source = generator.isNone()
                  ? at::globalContext().defaultGenerator(on_.device())
                  : generator.toGenerator();
  std::lock_guard guard{source.mutex()};
  auto* generator_of_device = at::check_generator<sim_generator>(source);
  return at::detail::createCPUGenerator(generator_of_device->next_seed());
}

std::optional<result_shapes> operator_call::ask_meta() {
  value_stack meta;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (arguments_[i].isDevice()) {
      meta.emplace_back(c10::Device{c10::kMeta});
      continue;
    }
    meta.push_back(map_tensors(arguments_[i], [&](const at::Tensor& x) {
      auto result = is_ours(x) ? meta_of(x) : x;
      if (is_ours(x) && writes(i))
        written.emplace_back(x, result);
      return result;
    }));
  }
  if (!runs_on_meta(op_, meta))
    return {};
  auto resized = false;
  for (auto& [x, wanted] : written)
    if (x.sizes() != wanted.sizes()) {
      x.resize_(wanted.sizes());
      resized = true;
    }
  if (resized)
    take_arguments();
  return shapes_of(meta);
}

call_results operator_call::make_results(const result_shapes& shapes) const {
  call_results all;
  size_t position = 0;
  auto next = [&] {
    auto made = make_tensor(on_, shapes.tensors[position]);
    all.targets.emplace_back(position++, twin(made));
    all.accesses.push_back(touching(made, true));
    return made;
  };
  for (size_t i = 0; i < shapes.lengths.size(); ++i) {
    auto length = shapes.lengths[i];
    if (const auto* alias = schema().returns()[i].alias_info()) {
      all.values.push_back(argument_of(*alias));
      position += number_of_tensors(length);
    } else if (length >= 0) {
      c10::List<at::Tensor> list;
      for (int64_t k = 0; k < length; ++k)
        list.push_back(next());
      all.values.emplace_back(list);
    } else {
      all.values.emplace_back(length == one_tensor ? next() : at::Tensor{});
    }
  }
  return all;
}

void operator_call::copy_grown() const {
  for (size_t i = 0; grows_ && i < cpu_.size(); ++i) {
    if (!arguments_[i].isTensor() || !writes(i))
      continue;
    const auto& to = arguments_[i].toTensor();
    const auto& made = cpu_[i].toTensor();
    if (is_ours(to) && to.numel() == 0 && made.numel() > 0)
      copy_from_and_resize(made, to);
  }
}

const IValue& operator_call::argument_of(const c10::AliasInfo& returned) const {
  TORCH_CHECK(returned.isWrite(), "sim: no kernel for the view ", name());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto* alias = schema().arguments()[i].alias_info();
    if (is_written(alias) && alias->beforeSets() == returned.beforeSets())
      return arguments_[i];
  }
  TORCH_CHECK(false, "sim: ", name(), " returns an argument that it has not");
}

bool operator_call::writes(size_t argument) const {
  return is_written(schema().arguments()[argument].alias_info());
}

} // namespace smp::sim
