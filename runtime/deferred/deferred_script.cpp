#include "runtime/deferred/deferred_script.hpp"

#include "runtime/base/fnv_hash.hpp"
#include "runtime/deferred/deferred_init.hpp"
#include "runtime/deferred/deferred_tensor.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "transport/error.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <caffe2/serialize/in_memory_adapter.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <sys/stat.h>

namespace smp {

namespace {

namespace jit = torch::jit;

using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;

// -- the file -----------------------------------------------------------------

/// Differs if the file was written again.
int64_t stamp_of(const std::string& path) {
  struct stat x {};
  if (::stat(path.c_str(), &x) != 0)
    throw error{error_code::config, "cannot read '" + path
                                      + "', whose model is not complete yet: "
                                      + std::strerror(errno)};
  fnv_hash hash;
  hash.add(static_cast<uint64_t>(x.st_ino));
  hash.add(static_cast<uint64_t>(x.st_size));
  hash.add(static_cast<uint64_t>(x.st_mtim.tv_sec));
  hash.add(static_cast<uint64_t>(x.st_mtim.tv_nsec));
  return static_cast<int64_t>(hash.get());
}

/// Keeps the last file open, so that its directory is read only once.
std::shared_ptr<PyTorchStreamReader> open_archive(const std::string& path,
                                                  int64_t stamp) {
  static std::mutex mutex;
  static std::pair<std::string, int64_t> opened;
  static auto& last = *new std::shared_ptr<PyTorchStreamReader>;
  std::unique_lock guard{mutex};
  auto now = stamp_of(path);
  if (now != stamp)
    throw error{error_code::config,
                "'" + path + "' was written again before the partition read "
                  "the tensors of this rank from it"};
  if (std::pair wanted{path, stamp}; !last || opened != wanted) {
    last = std::make_shared<PyTorchStreamReader>(path);
    opened = std::move(wanted);
  }
  return last;
}

/// The bytes of a storage. On the meta device only its size.
at::Tensor read_storage(const std::string& path, int64_t stamp,
                        const std::string& entry, int64_t elements,
                        c10::ScalarType dtype, c10::Device device) {
  auto result = at::empty({elements},
                          c10::TensorOptions{}.dtype(dtype).device(device));
  if (!device.is_meta())
    open_archive(path, stamp)
      ->getRecord(entry, result.mutable_data_ptr(), result.nbytes());
  return result;
}

/// Through the dispatcher, which captures it (deferred_init.cpp).
at::Tensor call_read_storage(const std::string& path, int64_t stamp,
                             const std::string& entry, int64_t elements,
                             c10::ScalarType dtype) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
    "smp::read_storage", "");
  jit::Stack stack{path, stamp, entry, elements, dtype, c10::Device{c10::kCPU}};
  op.callBoxed(&stack);
  return stack.back().toTensor();
}

// -- a file without large tensors ---------------------------------------------

/// Replaces the bytes of a large storage; refers to its entry.
struct placeholder {
  std::array<char, 24> mark = {};
  uint64_t entry = 0; // position in `outline::entries`
};

constexpr std::array<char, 24> mark = {"smp: bytes on demand"};

/// The same archive, with placeholders for large storages.
struct outline {
  std::string bytes;
  std::vector<std::pair<std::string, uint64_t>> entries; // names and sizes
};

bool contains(std::string_view text, std::string_view x) {
  return text.find(x) != std::string_view::npos;
}

/// Tells whether loading does more with tensors than store them.
bool uses_values(const std::string& entry, std::string_view bytes) {
  if (entry.starts_with("code/"))
    return contains(bytes, "__setstate__");
  if (entry != "data.pkl")
    return false;
  constexpr std::string_view rebuild = "_rebuild_";
  for (auto i = bytes.find(rebuild); i != std::string_view::npos;
       i = bytes.find(rebuild, i + 1))
    if (!bytes.substr(i + rebuild.size()).starts_with("tensor_v2"))
      return true;
  // Pickled objects that C++ restores, and tensors that a flag changes.
  using namespace std::string_view_literals;
  return contains(bytes, "__torch__.torch.classes.")
         || contains(bytes, "X\4\0\0\0conj"sv)
         || contains(bytes, "X\3\0\0\0neg"sv);
}

/// @returns nothing if the file must be read as a whole
std::optional<outline> read_outline(PyTorchStreamReader& file,
                                    size_t at_least) {
  outline result;
  PyTorchStreamWriter writer{[&result](const void* data, size_t size) {
    result.bytes.append(static_cast<const char*>(data), size);
    return size;
  }};
  auto possible = true;
  for (auto& name : file.getAllRecords()) {
    // The writer adds its own.
    if (name == ".data/serialization_id" || name.starts_with("extra/"))
      continue;
    auto size = file.getRecordSize(name);
    if (name.starts_with("data/") && size >= at_least) {
      placeholder x{mark, result.entries.size()};
      writer.writeRecord(name, &x, sizeof(x));
      result.entries.emplace_back(name, size);
      continue;
    }
    auto [data, read] = file.getRecord(name);
    possible = possible
               && !uses_values(name,
                               {static_cast<const char*>(data.get()), read});
    writer.writeRecord(name, data.get(), read);
  }
  writer.writeEndOfFile();
  if (!possible || result.entries.empty())
    return std::nullopt;
  return result;
}

// -- deferred tensors in place of placeholders
// ---------------------------------

class delayer {
public:
  delayer(const std::string& path, int64_t stamp, const outline& x)
    : path_(path), stamp_(stamp), outline_(x) {
    // nop
  }

  /// Replaces the tensors in `x` and in everything below it.
  void visit(c10::IValue& x) {
    if (x.isTensor()) {
      if (x.toTensor().defined())
        x = replacement(x.toTensor());
    } else if (x.isIntList() || x.isDoubleList() || x.isBoolList()) {
      return;
    } else if (x.isList()) {
      auto items = x.toList();
      for (size_t i = 0; i < items.size(); ++i) {
        auto item = items.get(i);
        visit(item);
        items.set(i, item);
      }
    } else if (x.isTuple()) {
      auto tuple = x.toTuple();
      for (size_t i = 0; i < tuple->elements().size(); ++i) {
        auto item = tuple->elements()[i];
        visit(item);
        tuple->unsafeSetElement(i, std::move(item));
      }
    } else if (x.isGenericDict()) {
      auto dict = x.toGenericDict();
      std::vector<c10::IValue> keys;
      for (auto& entry : dict)
        keys.push_back(entry.key());
      for (auto& key : keys) {
        auto item = dict.at(key);
        visit(item);
        dict.insert_or_assign(key, item);
      }
    } else if (x.isObject() && seen_.insert(&x.toObjectRef()).second) {
      auto object = x.toObject();
      for (size_t i = 0; i < object->slots().size(); ++i) {
        auto item = object->slots()[i];
        visit(item);
        object->setSlot(i, std::move(item));
      }
    }
  }

  /// Ends replacement. @returns whether no placeholder is left anywhere
  bool finish() {
    tensors_.clear();
    for (auto& [storage, base] : bases_)
      if (base.storage.use_count() > 1)
        return false;
    return bases_.size() == outline_.entries.size();
  }

private:
  struct replaced_tensor {
    at::Tensor before; // alive, or its address could be reused
    at::Tensor after;
  };

  struct deferred_storage {
    c10::Storage storage; // the placeholder
    at::Tensor bytes;     // what it stands for
  };

  const placeholder* find(const c10::Storage& x) const {
    auto* result = static_cast<const placeholder*>(x.data());
    if (x.nbytes() < sizeof(placeholder) || result->mark != mark)
      return nullptr;
    auto& [name, size] = outline_.entries.at(result->entry);
    if (size != x.nbytes())
      throw error{error_code::config,
                  "its tensor '" + name + "' has " + std::to_string(size)
                    + " bytes instead of " + std::to_string(x.nbytes())};
    return result;
  }

  at::Tensor replacement(const at::Tensor& x) {
    if (is_deferred(x) || !x.has_storage())
      return x;
    auto known = tensors_.find(x.unsafeGetTensorImpl());
    if (known != tensors_.end())
      return known->second.after;
    auto* found = find(x.storage());
    if (!found)
      return x;
    c10::AutoGradMode no_history{false};
    delay_param_initialization scope;
    auto& base = bases_[x.storage().unsafeGetStorageImpl()];
    if (!base.bytes.defined()) {
      auto elements = x.storage().nbytes() / x.element_size();
      base.bytes = call_read_storage(
        path_, stamp_, outline_.entries[found->entry].first,
        static_cast<int64_t>(elements), x.scalar_type());
      base.storage = x.storage();
    }
    auto result = base.bytes.as_strided(x.sizes(), x.strides(),
                                        x.storage_offset());
    result.set_requires_grad(x.requires_grad());
    tensors_.emplace(x.unsafeGetTensorImpl(), replaced_tensor{x, result});
    return result;
  }

  const std::string& path_;
  int64_t stamp_;
  const outline& outline_;
  std::map<const void*, deferred_storage> bases_; // by placeholder
  std::map<const void*, replaced_tensor> tensors_;
  std::unordered_set<const void*> seen_;
};

// -- rows of a tensor ---------------------------------------------------------

/// @returns the operation that reads exactly all of `x`, or null
const captured_op* reader_of(const deferred_impl& x) {
  auto& read = x.memory()->last_write;
  auto& view = *x.origin().op; // see `replacement`
  auto whole = read->op.schema().name() == "smp::read_storage"
               && view.op.schema().name() == "aten::as_strided"
               && view.holes.size() == 1 && view.holes.front().tensor.op == read
               && x.twin().is_contiguous() && x.twin().dim() > 0
               && x.twin().numel() > 0
               && x.twin().numel() == read->arguments.at(3).toInt();
  return whole ? read.get() : nullptr;
}

} // namespace

bool read_rows(const at::Tensor& x,
               const std::function<void(int64_t, const at::Tensor&)>& f) {
  constexpr int64_t wanted = 256 << 10; // bytes of a piece
  std::unique_lock guard{capture_mutex()};
  auto* impl = deferred(x);
  auto* read = impl ? reader_of(*impl) : nullptr;
  if (!read)
    return false;
  auto& path = read->arguments.at(0).toStringRef();
  c10::AutoGradMode no_history{false};
  auto sizes = x.sizes().vec();
  const auto rows = sizes[0];
  const auto row_bytes = static_cast<int64_t>(x.nbytes()) / rows;
  sizes[0] = std::clamp(wanted / row_bytes, int64_t{1}, rows);
  auto piece = at::empty(sizes, x.options());
  int64_t first = 0;
  open_archive(path, read->arguments.at(1).toInt())
    ->getRecord(read->arguments.at(2).toStringRef(), piece.mutable_data_ptr(),
                x.nbytes(), piece.nbytes(), piece.mutable_data_ptr(),
                [&](void*, const void*, size_t bytes) {
                  auto n = static_cast<int64_t>(bytes) / row_bytes;
                  f(first, piece.narrow(0, 0, n));
                  first += n;
                });
  if (first != rows)
    throw error{error_code::config,
                "'" + path + "' cannot be read a part at a time"};
  return true;
}

torch::jit::Module load_deferred_script(const std::string& relative,
                                        size_t at_least) {
  at_least = std::max(at_least, sizeof(placeholder));
  delay_param_initialization plain{false};
  auto path = std::filesystem::absolute(relative).string();
  auto stamp = stamp_of(path);
  if (auto x = read_outline(*open_archive(path, stamp), at_least)) {
    auto result = jit::load(
      std::make_shared<caffe2::serialize::MemoryReadAdapter>(
        x->bytes.data(), static_cast<off_t>(x->bytes.size())),
      c10::kCPU);
    delayer todo{path, stamp, *x};
    c10::IValue root{result._ivalue()};
    todo.visit(root);
    if (todo.finish())
      return result;
  }
  return jit::load(path, c10::kCPU);
}

} // namespace smp

TORCH_LIBRARY_FRAGMENT(smp, m) {
  m.def(
    "read_storage(str path, int stamp, str entry, int elements, "
    "ScalarType dtype, Device device) -> Tensor",
    &smp::read_storage);
}
