#include "runtime/checkpoint/safetensors.hpp"

#include "runtime/files/file_io.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/files/regular_file.hpp"

#include <ATen/EmptyTensor.h>
#include <nlohmann/json.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <set>
#include <string_view>

namespace smp {

static_assert(std::endian::native == std::endian::little,
              "the file format has little endian numbers");

namespace {

using json = nlohmann::json;

constexpr size_t prefix_size = sizeof(uint64_t);
constexpr uint64_t max_header_size = 100'000'000; // as in other readers

// -- element types ------------------------------------------------------------

struct dtype_name {
  c10::ScalarType type;
  std::string_view name;
};

constexpr auto dtype_names = std::to_array<dtype_name>({
  {c10::ScalarType::Bool, "BOOL"},
  {c10::ScalarType::Byte, "U8"},
  {c10::ScalarType::Char, "I8"},
  {c10::ScalarType::UInt16, "U16"},
  {c10::ScalarType::Short, "I16"},
  {c10::ScalarType::UInt32, "U32"},
  {c10::ScalarType::Int, "I32"},
  {c10::ScalarType::UInt64, "U64"},
  {c10::ScalarType::Long, "I64"},
  {c10::ScalarType::Half, "F16"},
  {c10::ScalarType::BFloat16, "BF16"},
  {c10::ScalarType::Float, "F32"},
  {c10::ScalarType::Double, "F64"},
  {c10::ScalarType::ComplexFloat, "C64"},
  {c10::ScalarType::Float8_e5m2, "F8_E5M2"},
  {c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
  {c10::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
});

/// @returns nothing if the format has no such type
std::string_view name_of(c10::ScalarType x) {
  auto i = std::ranges::find(dtype_names, x, &dtype_name::type);
  return i == dtype_names.end() ? std::string_view{} : i->name;
}

// -- errors -------------------------------------------------------------------

/// Says what is wrong with a file, and with which tensor in it.
class tensor_errors : public file_errors {
public:
  using file_errors::fail;
  using file_errors::file_errors;

  [[noreturn]] void fail(const std::string& tensor,
                         const std::string& why) const {
    fail("tensor \"" + tensor + "\": " + why);
  }
};

// -- writing ------------------------------------------------------------------

struct written_tensor {
  const tensor_outline* outline;
  size_t position;
  std::string_view dtype;
  uint64_t bytes;
};

std::vector<written_tensor> describe(const std::vector<tensor_outline>& tensors,
                                     const tensor_errors& e) {
  std::set<std::string_view> names{"__metadata__"};
  std::vector<written_tensor> result;
  result.reserve(tensors.size());
  for (auto& t : tensors) {
    if (!names.insert(t.name).second)
      e.fail(t.name, "this name is taken");
    auto& x = result.emplace_back(written_tensor{&t, result.size(), {}, 0});
    x.dtype = name_of(t.dtype);
    if (x.dtype.empty())
      e.fail(t.name,
             std::string{"the format has no "} + c10::toString(t.dtype));
    x.bytes = c10::elementSize(t.dtype);
    for (auto size : t.shape)
      x.bytes *= static_cast<uint64_t>(size);
  }
  return result;
}

/// @returns the JSON header, padded so that the data starts at a multiple of 8.
std::string make_header(const std::vector<written_tensor>& tensors,
                        const string_map& metadata, const tensor_errors& e) {
  auto header = json::object();
  if (!metadata.empty())
    header["__metadata__"] = metadata;
  uint64_t end = 0;
  for (auto& x : tensors) {
    auto begin = end;
    end += x.bytes;
    header[x.outline->name] = {{"dtype", x.dtype},
                               {"shape", x.outline->shape},
                               {"data_offsets", {begin, end}}};
  }
  std::string result;
  try {
    result = header.dump();
  } catch (const nlohmann::json::exception&) {
    e.fail("a name or a metadata entry is not valid UTF-8");
  }
  result.resize((result.size() + 7) / 8 * 8, ' ');
  return result;
}

} // namespace

void write_safetensors(const std::string& path,
                       const std::vector<tensor_outline>& tensors,
                       const std::function<at::Tensor(size_t)>& value,
                       const string_map& metadata) {
  tensor_errors e{"write", path};
  auto order = describe(tensors, e);
  // The format has no padding: with large elements first, all are aligned.
  std::stable_sort(order.begin(), order.end(), [](auto& a, auto& b) {
    return c10::elementSize(a.outline->dtype)
           > c10::elementSize(b.outline->dtype);
  });
  auto header = make_header(order, metadata, e);
  uint64_t size = header.size();
  replacement out{path, e};
  out.write(&size, sizeof size);
  out.write(header.data(), header.size());
  for (auto& x : order) {
    auto tensor = value(x.position);
    if (auto why = refusal_of(tensor); !why.empty())
      e.fail(x.outline->name, why);
    auto bytes = to_tensor_ref(tensor.to(at::kCPU).contiguous(), false);
    if (bytes.nbytes != x.bytes)
      e.fail(x.outline->name, "its size changed meanwhile");
    out.write(bytes.data, bytes.nbytes);
  }
  out.commit();
}

void write_safetensors(const std::string& path, const named_tensors& tensors,
                       const string_map& metadata) {
  std::vector<tensor_outline> outlines;
  for (auto& [name, x] : tensors) {
    if (auto why = refusal_of(x); !why.empty())
      tensor_errors{"write", path}.fail(name, why);
    outlines.push_back({name, x.scalar_type(), x.sizes().vec()});
  }
  write_safetensors(
    path, outlines, [&](size_t i) { return tensors[i].second; }, metadata);
}

// -- reading ------------------------------------------------------------------

namespace {

struct described_tensor {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin;
  uint64_t end;
};

/// Parses the header; refuses duplicate names, which JSON allows.
json parse_header(const std::string& text, const tensor_errors& e) {
  std::set<std::string> names;
  auto check = [&](int depth, json::parse_event_t event, json& x) {
    if (depth > 3)
      e.fail("the header is nested too deep");
    if (depth == 1 && event == json::parse_event_t::key
        && !names.insert(x.get<std::string>()).second)
      e.fail(x.get<std::string>(), "stands twice in the header");
    return true;
  };
  try {
    auto result = json::parse(text, check);
    if (!result.is_object())
      e.fail("the header is not a JSON object");
    return result;
  } catch (const json::exception& x) {
    e.fail(std::string{"the header is not valid JSON: "} + x.what());
  }
}

const json& field_of(const json& x, const std::string& tensor, const char* key,
                     const tensor_errors& e) {
  auto i = x.find(key);
  if (i == x.end())
    e.fail(tensor, std::string{"has no "} + key);
  return *i;
}

/// @returns the size in bytes that dtype and shape require.
uint64_t needed_bytes(const described_tensor& x, const tensor_errors& e) {
  uint64_t result = c10::elementSize(x.dtype);
  bool empty = false;
  for (auto size : x.shape) {
    empty = empty || size == 0;
    // Also without data: strides are computed from these numbers.
    auto n = static_cast<uint64_t>(std::max<int64_t>(size, 1));
    if (__builtin_mul_overflow(result, n, &result) || result > INT64_MAX)
      e.fail(x.name, "its shape overflows");
  }
  return empty ? 0 : result;
}

c10::ScalarType parse_dtype(const json& x, const std::string& tensor,
                            const tensor_errors& e) {
  if (!x.is_string())
    e.fail(tensor, "its dtype is not a string");
  for (auto& d : dtype_names)
    if (d.name == x.get_ref<const std::string&>())
      return d.type;
  e.fail(tensor, "unknown dtype " + x.dump());
}

described_tensor parse_tensor(const std::string& name, const json& x,
                              uint64_t data_size, const tensor_errors& e) {
  if (!x.is_object())
    e.fail(name, "its description is not an object");
  if (x.size() != 3)
    e.fail(name, "dtype, shape and data_offsets expected, nothing else");
  described_tensor result;
  result.name = name;
  result.dtype = parse_dtype(field_of(x, name, "dtype", e), name, e);
  auto& shape = field_of(x, name, "shape", e);
  if (!shape.is_array())
    e.fail(name, "its shape is not a list");
  for (auto& size : shape) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > INT64_MAX)
      e.fail(name, "its shape has a size " + size.dump());
    result.shape.push_back(size.get<int64_t>());
  }
  auto& offsets = field_of(x, name, "data_offsets", e);
  if (!offsets.is_array() || offsets.size() != 2
      || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
    e.fail(name, "its data_offsets are not two sizes");
  result.begin = offsets[0].get<uint64_t>();
  result.end = offsets[1].get<uint64_t>();
  if (result.begin > result.end || result.end > data_size)
    e.fail(name, "its data_offsets " + offsets.dump() + " leave the "
                   + std::to_string(data_size) + " bytes of data");
  if (needed_bytes(result, e) != result.end - result.begin)
    e.fail(name, "its data_offsets hold "
                   + std::to_string(result.end - result.begin)
                   + " bytes, its shape needs "
                   + std::to_string(needed_bytes(result, e)));
  return result;
}

string_map parse_metadata(const json& x, const tensor_errors& e) {
  if (!x.is_object())
    e.fail("__metadata__ is not an object");
  string_map result;
  for (auto& [key, item] : x.items()) {
    if (!item.is_string())
      e.fail("__metadata__: \"" + key + "\" is not a string");
    result.emplace(key, item.get<std::string>());
  }
  return result;
}

/// Sorts by offset; the tensors must fill the data without hole or overlap.
void order(std::vector<described_tensor>& xs, uint64_t data_size,
           const tensor_errors& e) {
  std::sort(xs.begin(), xs.end(), [](auto& a, auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t end = 0;
  for (auto& x : xs) {
    if (x.begin < end)
      e.fail(x.name, "its data overlaps with that of another tensor");
    if (x.begin > end)
      e.fail(x.name, std::to_string(x.begin - end)
                       + " bytes before its data belong to no tensor");
    end = x.end;
  }
  if (end != data_size)
    e.fail(std::to_string(data_size - end)
           + " bytes at its end belong to no tensor");
}

/// @returns the header's text; afterwards `fd` is positioned at the data.
std::string read_header(int fd, uint64_t file_size, const tensor_errors& e) {
  if (file_size < prefix_size)
    e.fail("its " + std::to_string(file_size)
           + " bytes are too few for a safetensors file");
  uint64_t size = 0;
  read_all(fd, &size, sizeof size, e);
  if (size > file_size - prefix_size || size > max_header_size)
    e.fail("it claims a header of " + std::to_string(size)
           + " bytes; the file has " + std::to_string(file_size)
           + ", and the format allows " + std::to_string(max_header_size));
  std::string result(size, ' ');
  read_all(fd, result.data(), size, e);
  return result;
}

} // namespace

safetensors_reader::safetensors_reader(const std::string& path) : path_(path) {
  tensor_errors e{"read", path};
  std::string why;
  file_ = open_regular(path, why);
  if (!file_)
    e.fail(why);
  struct stat info = {};
  if (::fstat(file_.get(), &info) != 0)
    e.fail_errno("stat");
  auto file_size = static_cast<uint64_t>(info.st_size);
  auto text = read_header(file_.get(), file_size, e);
  auto data_begin = prefix_size + text.size();
  std::vector<described_tensor> described;
  auto header = parse_header(text, e);
  for (auto& [name, x] : header.items()) {
    if (name == "__metadata__")
      metadata_ = parse_metadata(x, e);
    else
      described.push_back(parse_tensor(name, x, file_size - data_begin, e));
  }
  order(described, file_size - data_begin, e);
  for (auto& x : described) {
    positions_.emplace(x.name, tensors_.size());
    begins_.push_back(data_begin + x.begin);
    tensors_.push_back({std::move(x.name), x.dtype, std::move(x.shape)});
  }
}

std::optional<size_t> safetensors_reader::find(const std::string& name) const {
  auto i = positions_.find(name);
  return i == positions_.end() ? std::nullopt : std::optional{i->second};
}

namespace {

void read_at(int fd, uint64_t begin, void* to, uint64_t bytes,
             const tensor_errors& e) {
  if (::lseek(fd, static_cast<off_t>(begin), SEEK_SET) < 0)
    e.fail_errno("seek");
  read_all(fd, to, bytes, e);
}

} // namespace

at::Tensor safetensors_reader::read(size_t position) const {
  auto& x = tensors_.at(position);
  at::Tensor result = at::detail::empty_cpu(x.shape, x.dtype);
  read_at(file_.get(), begins_[position], result.mutable_data_ptr(),
          result.nbytes(), {"read", path_});
  return result;
}

at::Tensor safetensors_reader::read_rows(size_t position, int64_t begin,
                                         int64_t rows) const {
  auto& x = tensors_.at(position);
  auto shape = x.shape;
  shape.at(0) = rows;
  at::Tensor result = at::detail::empty_cpu(shape, x.dtype);
  read_rows(position, begin, rows, result.mutable_data_ptr());
  return result;
}

void safetensors_reader::read_rows(size_t position, int64_t begin, int64_t rows,
                                   void* to) const {
  auto& x = tensors_.at(position);
  uint64_t row = c10::elementSize(x.dtype);
  for (size_t i = 1; i < x.shape.size(); ++i)
    row *= static_cast<uint64_t>(x.shape[i]);
  read_at(file_.get(), begins_[position] + static_cast<uint64_t>(begin) * row,
          to, static_cast<uint64_t>(rows) * row, {"read", path_});
}

safetensors_file read_safetensors(const std::string& path) {
  safetensors_reader file{path};
  safetensors_file result;
  result.metadata = file.metadata();
  for (size_t i = 0; i < file.tensors().size(); ++i)
    result.tensors.emplace_back(file.tensors()[i].name, file.read(i));
  return result;
}

std::string dtype_in_file(c10::ScalarType x) {
  return std::string{name_of(x)};
}

const at::Tensor*
safetensors_file::find(const std::string& name) const noexcept {
  for (auto& [key, tensor] : tensors)
    if (key == name)
      return &tensor;
  return nullptr;
}

} // namespace smp
