#include "transport/ucx/wire.hpp"

#include <bit>
#include <cstring>

namespace smp::ucx {

static_assert(std::endian::native == std::endian::little);

namespace {

struct description_head {
  message_kind kind;
  uint8_t reserved[3];
  uint32_t tensors;
  uint64_t envelope_size;
};

struct tensor_head {
  uint64_t nbytes;
  uint8_t dtype;
  uint8_t device_type;
  int16_t device_index;
  uint32_t dims;
};

static_assert(sizeof(description_head) == 16);
static_assert(sizeof(tensor_head) == 16);

/// Appends to memory that is large enough.
struct writer {
  std::byte* out;

  void bytes(const void* x, size_t size) {
    if (size > 0)
      std::memcpy(out, x, size);
    out += size;
  }

  template <class T>
  void value(const T& x) {
    bytes(&x, sizeof x);
  }
};

/// Takes from the front and never beyond the end.
struct reader {
  std::span<const std::byte> rest;

  std::optional<std::span<const std::byte>> bytes(uint64_t size) {
    if (size > rest.size())
      return std::nullopt;
    auto result = rest.first(size);
    rest = rest.subspan(size);
    return result;
  }

  template <class T>
  bool value(T& x) {
    auto from = bytes(sizeof x);
    if (from)
      std::memcpy(&x, from->data(), sizeof x);
    return from.has_value();
  }
};

uint64_t align_up(uint64_t x) {
  return (x + block_pool::alignment - 1) / block_pool::alignment
         * block_pool::alignment;
}

/// @returns whether `x` is a tensor that a correct rank describes.
bool read_tensor(reader& in, tensor_ref& x) {
  tensor_head head;
  if (!in.value(head) || head.nbytes > tensor_limit
      || head.dims > in.rest.size() / sizeof(int64_t))
    return false;
  x.nbytes = head.nbytes;
  x.dtype = head.dtype;
  x.device = {head.device_type, head.device_index};
  x.shape.resize(head.dims);
  for (auto& size : x.shape)
    if (!in.value(size) || size < 0)
      return false;
  // Received bytes lie in host memory, whatever the sender says.
  return x.device == device_ref{};
}

} // namespace

std::optional<unit_header> read_header(std::span<const std::byte> bytes) {
  unit_header result;
  reader in{bytes};
  if (!in.value(result) || result.magic != unit_header::expected_magic
      || result.version != unit_header::expected_version
      || result.kind < unit_kind::description
      || result.kind > unit_kind::goodbye || result.data > data_kind::bytes)
    return std::nullopt;
  return result;
}

bool is_packed(const tensor_ref& x) noexcept {
  return x.nbytes <= packed_limit;
}

std::vector<std::byte> write_description(const message& x, size_t prefix) {
  auto& tensors = x.body.tensors;
  auto size = prefix + sizeof(description_head) + x.body.bytes.size();
  for (auto& t : tensors)
    size += sizeof(tensor_head) + t.shape.size() * sizeof(int64_t)
            + (is_packed(t) ? t.nbytes : 0);
  std::vector<std::byte> result(size);
  writer out{result.data() + prefix};
  out.value(description_head{x.kind,
                             {},
                             static_cast<uint32_t>(tensors.size()),
                             x.body.bytes.size()});
  for (auto& t : tensors) {
    out.value(tensor_head{t.nbytes, t.dtype, t.device.type, t.device.index,
                          static_cast<uint32_t>(t.shape.size())});
    out.bytes(t.shape.data(), t.shape.size() * sizeof(int64_t));
  }
  out.bytes(x.body.bytes.data(), x.body.bytes.size());
  for (auto& t : tensors)
    if (is_packed(t))
      out.bytes(t.data, t.nbytes);
  return result;
}

std::optional<description> read_description(std::span<const std::byte> bytes,
                                            block_pool& pool) {
  reader in{bytes};
  description_head head;
  if (!in.value(head) || head.kind > message_kind::object
      || head.tensors > in.rest.size() / sizeof(tensor_head))
    return std::nullopt;
  description result;
  result.content.kind = head.kind;
  auto& body = result.content.body;
  body.tensors.resize(head.tensors);
  uint64_t packed = 0;
  uint64_t packed_aligned = 0;
  for (auto& t : body.tensors) {
    if (!read_tensor(in, t))
      return std::nullopt;
    if (is_packed(t)) {
      packed += t.nbytes;
      packed_aligned += align_up(t.nbytes);
    }
  }
  auto envelope = in.bytes(head.envelope_size);
  // Checked before memory is asked for: claims are cheap.
  if (!envelope || in.rest.size() != packed)
    return std::nullopt;
  body.bytes.assign(envelope->begin(), envelope->end());
  // One block for all; each tensor keeps it alive.
  std::shared_ptr<std::byte> block;
  uint64_t offset = 0;
  for (uint32_t i = 0; i < head.tensors; ++i) {
    auto& t = body.tensors[i];
    if (!is_packed(t)) {
      result.apart.push_back(i);
      continue;
    }
    if (!block)
      block = pool.take(packed_aligned);
    if (t.nbytes > 0)
      std::memcpy(block.get() + offset, in.bytes(t.nbytes)->data(), t.nbytes);
    t.data = block.get() + offset;
    t.owner = block;
    offset += align_up(t.nbytes);
  }
  return result;
}

} // namespace smp::ucx
