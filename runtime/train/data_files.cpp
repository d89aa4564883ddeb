// Files as data sources.

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/nn/sizes.hpp"
#include "runtime/train/batch_numbers.hpp"
#include "runtime/train/data.hpp"
#include "transport/file_descriptor.hpp"

#include <ATen/ops/empty.h>

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace smp {

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw error{error_code::config, fmt::format("{}: {}", path, why)};
}

struct mapped_file {
  std::span<const uint8_t> bytes;
  std::shared_ptr<const void> owner;
};

/// @returns the bytes of `path` as a read-only mapping
mapped_file map_file(const std::string& path) {
  auto fail = [&path] { refuse(path, std::strerror(errno)); };
  file_descriptor fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (!fd)
    fail();
  struct stat info = {};
  if (::fstat(fd.get(), &info) != 0)
    fail();
  if (S_ISDIR(info.st_mode))
    refuse(path, std::strerror(EISDIR));
  if (info.st_size == 0)
    refuse(path, "is empty");
  auto size = static_cast<size_t>(info.st_size);
  auto* bytes = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (bytes == MAP_FAILED)
    fail();
  return {{static_cast<const uint8_t*>(bytes), size},
          {bytes, [size](void* x) { ::munmap(x, size); }}};
}

} // namespace

// -- text ---------------------------------------------------------------------

text text::read(const std::string& path, double held_out) {
  auto file = map_file(path);
  return text{file.bytes, std::move(file.owner), path, held_out};
}

// -- tokens -------------------------------------------------------------------

token_sequences::token_sequences(const std::string& path, options x)
  : path_(path), options_(x) {
  require_positive("data.sequence_length", x.sequence_length);
  require_positive("data.batch_size", x.batch_size);
  auto file = map_file(path);
  bytes_ = file.bytes;
  owner_ = std::move(file.owner);
  size_ = bytes_.size() / x.token_size;
  border_ = static_cast<uint64_t>(static_cast<double>(size_)
                                  * (1 - x.held_out));
  if (bytes_.size() % x.token_size != 0)
    refuse(path, fmt::format("has {} bytes, no multiple of the {} of a "
                             "token; see data.dtype",
                             bytes_.size(), x.token_size));
  for (auto [what, n] :
       {std::pair{"training", border_}, std::pair{"held-out", size_ - border_}})
    if (n < x.sequence_length + 1)
      refuse(path,
             fmt::format("the {} part has {} tokens, but "
                         "data.sequence_length = {} needs at least {}",
                         what, n, x.sequence_length, x.sequence_length + 1));
}

batch token_sequences::make_training(uint64_t step, batch_part part) const {
  auto begins = random_begins(options_.seed, step, options_.batch_size,
                              border_ - options_.sequence_length);
  return cut(part_of(begins, part.index, part.count));
}

batch token_sequences::make_held_out(uint64_t index, uint64_t count,
                                     batch_part part) const {
  auto begins = even_begins(index, count, options_.batch_size,
                            size_ - border_ - options_.sequence_length - 1);
  for (auto& x : begins)
    x += border_;
  return cut(part_of(begins, part.index, part.count));
}

batch token_sequences::cut(const std::vector<uint64_t>& begins) const {
  const auto length = options_.sequence_length;
  auto both = at::empty(
    {2, static_cast<int64_t>(begins.size()), static_cast<int64_t>(length)},
    at::kLong);
  auto* in = both.mutable_data_ptr<int64_t>();
  auto* out = in + begins.size() * length;
  for (auto begin : begins)
    for (uint64_t t = 0; t <= length; ++t) {
      const auto x = token(begin + t);
      if (x >= options_.vocabulary)
        refuse(path_, fmt::format("token {} at position {} is not below "
                                  "model.vocabulary = {}",
                                  x, begin + t, options_.vocabulary));
      if (t < length)
        *in++ = static_cast<int64_t>(x);
      if (t > 0)
        *out++ = static_cast<int64_t>(x);
    }
  return {both.select(0, 0), both.select(0, 1)};
}

uint64_t token_sequences::token(uint64_t position) const {
  const void* tokens = bytes_.data(); // a mapping begins at a page
  return options_.token_size == 2
           ? static_cast<const uint16_t*>(tokens)[position]
           : static_cast<const uint32_t*>(tokens)[position];
}

// -- a fixed batch ------------------------------------------------------------

fixed_batch::fixed_batch(const std::string& path, options x)
  : file_(std::make_shared<safetensors_reader>(path)) {
  auto& tensors = file_->tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto name = fmt::format("input{}", i);
    auto position = file_->find(name);
    if (!position)
      refuse(path, fmt::format("has {} tensors, but none called {}; a batch is "
                               "input0, input1, ... in the order of the "
                               "model's arguments",
                               tensors.size(), name));
    inputs_.push_back(*position);
  }
  if (inputs_.empty())
    refuse(path,
           "has no tensor; a batch is input0, input1, ... in the order "
           "of the model's arguments");
  auto of_replicas = x.replicas > 1
                       ? fmt::format(" for each of {} replicas", x.replicas)
                       : std::string{};
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (tensors[inputs_[i]].shape.empty())
      refuse(path, fmt::format("input{} is a scalar, but each tensor is "
                               "divided along dim 0 into microbatches; repeat "
                               "it for each sample",
                               i));
    auto size = size_of(i);
    if (size == 0 || size % (x.microbatches * x.replicas) != 0)
      refuse(path, fmt::format("dim 0 of input{} is {}, which cannot be "
                               "divided into smp.microbatches = {}{}",
                               i, size, x.microbatches, of_replicas));
  }
  if (x.batch_size && *x.batch_size * x.replicas != batch_size())
    refuse(path, fmt::format("dim 0 of input0 is {}, but data.batch_size = "
                             "{}{}; leave the key out",
                             batch_size(), *x.batch_size, of_replicas));
}

uint64_t fixed_batch::size_of(size_t input) const noexcept {
  return static_cast<uint64_t>(file_->tensors()[inputs_[input]].shape.front());
}

batch fixed_batch::make_training(uint64_t, batch_part part) const {
  batch result;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    auto rows = static_cast<int64_t>(size_of(i) / part.count);
    result.push_back(file_->read_rows(
      inputs_[i], static_cast<int64_t>(part.index) * rows, rows));
  }
  return result;
}

batch fixed_batch::make_held_out(uint64_t, uint64_t, batch_part) const {
  throw error{error_code::internal, "a fixed batch has no held-out part"};
}

} // namespace smp
