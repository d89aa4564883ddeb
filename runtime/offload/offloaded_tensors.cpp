#include "runtime/offload/offloaded_tensors.hpp"

#include <c10/core/Storage.h>

#include <optional>
#include <utility>

namespace smp {

namespace {

/// Fewer bytes are not worth a system call.
constexpr uint64_t least = 4096;

/// @returns the bytes of a tensor, with the gaps between them, or nothing if
/// they stay in memory
std::optional<offload_store::part> bytes_of(const offload_store& store,
                                            const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided
      || !store.takes(tensor.device()) || !tensor.has_storage()
      || tensor.is_nested() || tensor.is_quantized() || tensor.is_conj()
      || tensor.is_neg() || tensor.numel() == 0)
    return std::nullopt;
  auto size = static_cast<uint64_t>(tensor.element_size());
  uint64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    last += static_cast<uint64_t>((tensor.size(i) - 1) * tensor.stride(i));
  offload_store::part result;
  result.bytes = (last + 1) * size;
  auto content = static_cast<uint64_t>(tensor.numel()) * size;
  if (result.bytes < least || result.bytes > 2 * content)
    return std::nullopt;
  result.memory = tensor.storage();
  result.offset = static_cast<uint64_t>(tensor.storage_offset()) * size;
  result.version = tensor.is_inference() ? 0 : tensor._version();
  // Elements must be aligned, also at the address where they come back.
  if (result.memory.data() == nullptr
      || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % size != 0)
    return std::nullopt;
  return result;
}

void set_storage(const at::Tensor& x, c10::Storage memory, int64_t offset) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_allow_tensor_metadata_change(true);
  impl->set_storage_keep_dtype(std::move(memory));
  impl->set_storage_offset(offset);
}

} // namespace

void drop_content(const at::Tensor& x) {
  // A tensor is where its storage is.
  c10::DataPtr none{nullptr, x.device()};
  set_storage(
    x, {c10::Storage::use_byte_size_t{}, 0, std::move(none), nullptr, false},
    0);
}

std::unique_ptr<offloaded_tensors>
offloaded_tensors::take(offload_store& store, uint64_t lane,
                        const std::vector<at::Tensor>& xs) {
  auto result = std::make_unique<offloaded_tensors>();
  std::vector<offload_store::part> parts;
  for (auto& x : xs)
    if (auto part = bytes_of(store, x)) {
      parts.push_back(std::move(*part));
      result->tensors_.push_back(x);
    }
  if (parts.empty())
    return nullptr;
  for (auto& x : result->tensors_)
    drop_content(x);
  result->bytes_ = store.give(lane, std::move(parts));
  return result;
}

void offloaded_tensors::put_back() {
  auto parts = bytes_->take();
  for (size_t i = 0; i < parts.size(); ++i) {
    auto& x = tensors_[i];
    auto size = static_cast<uint64_t>(x.element_size());
    set_storage(x, std::move(parts[i].memory),
                static_cast<int64_t>(parts[i].offset / size));
  }
  bytes_.reset();
}

} // namespace smp
