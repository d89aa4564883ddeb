#include "transport/ucx/wire.hpp"

#include "transport/bytes.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace smp::ucx {

namespace {

/// A message without the bytes of its tensors; its envelope follows, then the
/// packed tensors.
struct outline {
  message_kind kind = message_kind::request;
  uint64_t envelope_size = 0;
  std::vector<tensor_ref> tensors;
};

void write_outline(byte_writer& out, message_kind kind, uint64_t envelope_size,
                   const std::vector<tensor_ref>& tensors) {
  out.put(kind);
  out.put(envelope_size);
  out.count(tensors.size());
  for (auto t : tensors) {
    t.device = t.home;
    inspect_outline(out, t);
  }
}

/// Bytes of a tensor's size, dtype, device, whether it is lent, number of
/// dimensions, and whether there are strides.
constexpr size_t min_tensor_outline = 8 + 1 + 3 + 1 + 4 + 1;

outline read_outline(byte_reader& in) {
  outline result;
  result.kind = in.get<message_kind>("kind");
  result.envelope_size = in.u64("size of the envelope");
  auto n = in.count(min_tensor_outline, "tensors");
  for (uint32_t i = 0; i < n; ++i) {
    byte_reader::scope inside{in, "tensor"};
    auto& t = result.tensors.emplace_back();
    inspect_outline(in, t);
    if (t.nbytes > tensor_limit)
      in.fail("nbytes", std::to_string(t.nbytes) + " are too many");
    // Received bytes are in host memory; the sender names their home device.
    t.home = std::exchange(t.device, device_ref{});
  }
  return result;
}

uint64_t align_up(uint64_t x) {
  return (x + block_pool::alignment - 1) / block_pool::alignment
         * block_pool::alignment;
}

} // namespace

// -- header -------------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, unit_header& x) {
  auto get = [] { return header_mark; };
  auto set = [](uint32_t y) { return y == header_mark; };
  return f.object(x).fields(
    f.field("mark", get, set), f.field("kind", x.kind), f.field("data", x.data),
    f.field("from", x.from), f.field("tensor", x.tensor),
    f.field("number", x.number), f.field("offset", x.offset),
    f.field("tensor size", x.tensor_size), f.field("transfer", x.transfer));
}

void write_header(std::span<std::byte> to, const unit_header& x,
                  const run_token& token) {
  byte_writer out;
  out.put(x);
  auto bytes = out.take();
  auto rest = std::copy(token.begin(), token.end(), to.begin());
  std::copy(bytes.begin(), bytes.end(), rest);
}

std::optional<unit_header> read_header(std::span<const std::byte> bytes,
                                       const run_token& token) {
  if (bytes.size() < token.size()
      || !equal_in_constant_time(bytes.first(token.size()), token))
    return std::nullopt;
  try {
    return byte_reader{bytes.subspan(token.size()), "header"}
      .get<unit_header>();
  } catch (const std::exception&) { // also if memory for the error is missing
    return std::nullopt;
  }
}

// -- description --------------------------------------------------------------

bool is_packed(const tensor_ref& x) noexcept {
  return x.nbytes <= packed_limit;
}

std::vector<std::byte> write_description(const message& x, size_t prefix) {
  auto& tensors = x.body.tensors;
  auto size = prefix + sizeof(outline) + x.body.bytes.size();
  for (auto& t : tensors)
    size += min_tensor_outline
            + (t.shape.size() + t.strides.size()) * sizeof(int64_t)
            + (is_packed(t) ? t.nbytes : 0);
  byte_writer out;
  out.reserve(size);
  out.raw(std::vector<std::byte>(prefix));
  write_outline(out, x.kind, x.body.bytes.size(), tensors);
  out.raw(x.body.bytes);
  for (auto& t : tensors)
    if (is_packed(t))
      out.raw({static_cast<const std::byte*>(t.data), t.nbytes});
  return out.take();
}

description read_description(std::span<const std::byte> bytes,
                             block_pool& pool) {
  byte_reader in{bytes, "message"};
  auto head = read_outline(in);
  uint64_t packed = 0;
  uint64_t packed_aligned = 0;
  for (auto& t : head.tensors)
    if (is_packed(t)) {
      packed += t.nbytes;
      packed_aligned += align_up(t.nbytes);
    }
  auto envelope = in.raw(head.envelope_size, "envelope");
  // Checked before memory is allocated, because claims are cheap.
  if (in.remaining() != packed)
    in.fail("tensors", std::to_string(packed) + " bytes wanted, "
                         + std::to_string(in.remaining()) + " left");
  description result;
  result.content = {
    head.kind, {{envelope.begin(), envelope.end()}, std::move(head.tensors)}};
  // One block for all packed tensors; each of them keeps it alive.
  std::shared_ptr<std::byte> block;
  uint64_t offset = 0;
  auto& tensors = result.content.body.tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& t = tensors[i];
    if (!is_packed(t)) {
      result.apart.push_back(i);
      continue;
    }
    if (!block)
      block = pool.take(packed_aligned);
    if (t.nbytes > 0)
      std::memcpy(block.get() + offset, in.raw(t.nbytes).data(), t.nbytes);
    t.data = block.get() + offset;
    t.owner = block;
    offset += align_up(t.nbytes);
  }
  return result;
}

} // namespace smp::ucx
