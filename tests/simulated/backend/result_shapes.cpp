#include "tests/simulated/backend/result_shapes.hpp"

#include <mutex>
#include <sstream>
#include <unordered_map>

namespace smp::sim {

namespace {

using c10::TypeKind;

bool is_tensor_type(const c10::Type& type) {
  if (type.kind() == TypeKind::ListType)
    return type.castRaw<c10::ListType>()->getElementType()->kind()
           == TypeKind::TensorType;
  return type.kind() == TypeKind::TensorType;
}

struct memory_of_shapes {
  std::mutex mutex;
  std::unordered_map<std::string, result_shapes> known;
};

memory_of_shapes& shapes_memory() {
  static auto* const only = new memory_of_shapes;
  return *only;
}

} // namespace

shape shape_of(const at::Tensor& x) {
  return {x.scalar_type(), x.sizes().vec(), x.strides().vec()};
}

result_shapes shapes_of(c10::ArrayRef<c10::IValue> results) {
  result_shapes all;
  for (const auto& x : results) {
    if (x.isTensorList())
      all.lengths.push_back(static_cast<int64_t>(x.toTensorVector().size()));
    else
      all.lengths.push_back(x.isTensor() && x.toTensor().defined() ? one_tensor
                                                                   : no_tensor);
  }
  for (const auto& t : tensors_of(results))
    all.tensors.push_back(shape_of(t));
  return all;
}

std::vector<at::Tensor> tensors_of(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> all;
  for (const auto& x : values) {
    if (x.isTensorList()) {
      auto list = x.toTensorVector();
      all.insert(all.end(), list.begin(), list.end());
    } else if (x.isTensor() && x.toTensor().defined()) {
      all.push_back(x.toTensor());
    }
  }
  return all;
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  for (const auto& x : schema.returns())
    if (!is_tensor_type(*x.type()))
      return false;
  return true;
}

std::string signature(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments) {
  std::ostringstream out;
  out << op.operator_name();
  for (const auto& x : arguments) {
    out << '|';
    auto tensors = 0;
    map_tensors(x, [&](const at::Tensor& t) {
      out << t.scalar_type() << t.sizes() << t.strides() << t.device();
      ++tensors;
      return t;
    });
    if (tensors == 0 && !x.isGenerator())
      out << x;
    else
      out << '#' << tensors;
  }
  return out.str();
}

std::optional<result_shapes> remembered_shapes(const std::string& signature) {
  auto& [mutex, known] = shapes_memory();
  std::lock_guard guard{mutex};
  auto found = known.find(signature);
  return found == known.end() ? std::nullopt : std::optional{found->second};
}

void remember_shapes(const std::string& signature,
                     const result_shapes& shapes) {
  auto& [mutex, known] = shapes_memory();
  std::lock_guard guard{mutex};
  known.emplace(signature, shapes);
}

} // namespace smp::sim
