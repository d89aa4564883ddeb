#include "tests/support/catch.hpp"

#include "runtime/data/data.hpp"
#include "tests/support/error_of.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/train/trainable.hpp"
#include "transport/error.hpp"

#include <torch/types.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>

#include <sys/stat.h>
#include <unistd.h>

using Catch::Matchers::ContainsSubstring;

namespace fs = std::filesystem;

namespace {

std::vector<uint8_t> count_to(size_t n) {
  std::vector<uint8_t> result(n);
  std::iota(result.begin(), result.end(), uint8_t{0});
  return result;
}

/// A file that goes with this object.
class temporary_file {
public:
  explicit temporary_file(const std::string& content) {
    std::string name = fs::temp_directory_path() / "smp-data-XXXXXX";
    auto fd = ::mkstemp(name.data());
    REQUIRE(fd >= 0);
    ::close(fd);
    path_ = name;
    std::ofstream{path_, std::ios::binary} << content;
  }

  ~temporary_file() {
    fs::remove(path_);
  }

  std::string path() const {
    return path_;
  }

private:
  fs::path path_;
};

/// The text is read from a file that no name leads to any more.
smp::token_sequences text_of(const std::string& bytes,
                             smp::token_sequences::options x) {
  temporary_file file{bytes};
  return {file.path(), x};
}

smp::token_sequences text_of(const std::vector<uint8_t>& bytes,
                             smp::token_sequences::options x) {
  return text_of(std::string{bytes.begin(), bytes.end()}, x);
}

std::string message_of(const std::function<void()>& f) {
  return smp::test::error_of(f, smp::error_code::config);
}

/// The bytes of row `b`.
std::string row(const torch::Tensor& x, int64_t b) {
  std::string result;
  for (int64_t t = 0; t < x.size(1); ++t)
    result += static_cast<char>(x[b][t].item<int64_t>());
  return result;
}

bool equal(const smp::batch& a, const smp::batch& b) {
  return torch::equal(a.at(0), b.at(0)) && torch::equal(a.at(1), b.at(1));
}

} // namespace

// -- text ---------------------------------------------------------------------

TEST_CASE("A text holds out its tail, byte by byte", "[runtime][data]") {
  std::string content{"caf\xc3\xa9\r\n\0end", 11};
  auto t = text_of(content, {.held_out = 0.5, .sequence_length = 4});
  CHECK(t.is_text());
  CHECK(t.prompt(100) == content.substr(5));
  CHECK(t.prompt(3) == content.substr(5, 3));
  CHECK(text_of(content, {.held_out = 0.25, .sequence_length = 1}).prompt(9)
        == "end");
}

TEST_CASE("A text that cannot be used is refused by name", "[runtime][data]") {
  auto refused = [](const std::string& path) {
    return message_of([&] { smp::token_sequences{path, {}}; });
  };
  CHECK_THAT(refused("/nowhere/to/be.txt"),
             ContainsSubstring("/nowhere/to/be.txt: No such file"));
  CHECK_THAT(refused("/"), ContainsSubstring("/: Is a directory"));
  temporary_file empty{""};
  CHECK_THAT(refused(empty.path()),
             ContainsSubstring(empty.path() + ": is empty"));
  // To open a pipe would wait for somebody who writes to it.
  fs::remove(empty.path());
  REQUIRE(::mkfifo(empty.path().c_str(), 0600) == 0);
  CHECK_THAT(refused(empty.path()),
             ContainsSubstring(empty.path() + ": is not a regular file"));
}

TEST_CASE("A text shorter than a sequence is refused with the sizes",
          "[runtime][data]") {
  // 90 + 10 bytes; a sequence of 9 needs 10.
  auto refused = [](uint64_t length, double held_out) {
    return message_of([&] {
      text_of(count_to(100), {.held_out = held_out, .sequence_length = length});
    });
  };
  CHECK(refused(9, 0.1) == "no error");
  auto text = refused(10, 0.1);
  CHECK_THAT(text, ContainsSubstring(": the held-out part has 10 bytes"));
  CHECK_THAT(text, ContainsSubstring("needs at least 11"));
  CHECK_THAT(refused(95, 0.1),
             ContainsSubstring("the training part has 90 bytes"));
  CHECK_THAT(refused(9, 1), ContainsSubstring("the training part has 0 bytes"));
}

TEST_CASE("The unigram entropy is the held-out cross entropy of byte counts",
          "[runtime][data]") {
  // Training "aaab", held out "ab": counts plus one are a 4, b 2, others 1.
  std::string bytes = "aaabab";
  auto t = text_of(bytes, {.held_out = 1.0 / 3, .sequence_length = 1});
  REQUIRE(t.prompt(9) == "ab");
  auto expected = -(std::log(4.0 / 260) + std::log(2.0 / 260)) / 2;
  CHECK(t.unigram_entropy() == Catch::Approx(expected).epsilon(1e-12));
}

TEST_CASE("The text that ships is large enough and close to its entropy",
          "[runtime][data]") {
  auto root = std::getenv("SMP_SOURCE_DIR");
  REQUIRE(root != nullptr);
  auto path = std::string{root} + "/config/data/opticks.txt";
  smp::token_sequences t{path, {}};
  std::ifstream file{path, std::ios::binary};
  std::string bytes{std::istreambuf_iterator<char>{file}, {}};
  CHECK(bytes.size() > 500'000);
  CHECK(bytes.size() < 2'000'000);
  // Plain entropy of the training part: other bytes, no smoothing, so near.
  bytes.resize(bytes.size() * 9 / 10);
  std::map<char, double> counts;
  for (auto x : bytes)
    ++counts[x];
  double entropy = 0;
  const auto n = static_cast<double>(bytes.size());
  for (auto& [byte, count] : counts)
    entropy -= count / n * std::log(count / n);
  CHECK(t.unigram_entropy() == Catch::Approx(entropy).margin(0.1));
}

// -- sequences of a text ------------------------------------------------------

TEST_CASE("The target is the text one byte later", "[runtime][data]") {
  auto data = text_of(count_to(250), {.sequence_length = 7, .batch_size = 5});
  auto xs = data.training_batch(3);
  auto &input = xs.at(0), &target = xs.at(1);
  REQUIRE(input.sizes() == torch::IntArrayRef{5, 7});
  REQUIRE(input.dtype() == torch::kLong);
  CHECK(torch::equal(target, input + 1));
}

TEST_CASE("Training sequences reach every place of the training part only",
          "[runtime][data]") {
  // 40 training bytes and sequences of 3 + 1: begins 0 to 36.
  auto data = text_of(
    count_to(50), {.held_out = 0.2, .sequence_length = 3, .batch_size = 10});
  std::map<int64_t, int> begins;
  for (uint64_t step = 0; step < 400; ++step) {
    auto first = data.training_batch(step)[0].select(1, 0).contiguous();
    for (int64_t b = 0; b < 10; ++b)
      ++begins[first[b].item<int64_t>()];
  }
  CHECK(begins.size() == 37);
  CHECK(begins.begin()->first == 0);
  CHECK(begins.rbegin()->first == 36);
  // 4000 draws over 37 places: 108 each, standard deviation about 10.
  for (auto& [begin, count] : begins)
    CHECK(std::abs(count - 108) < 60);
}

TEST_CASE("A training batch depends on seed and step alone",
          "[runtime][data]") {
  auto make = [](uint64_t seed) {
    return text_of(count_to(250),
                   {.sequence_length = 7, .batch_size = 5, .seed = seed});
  };
  auto a = make(1), b = make(1), c = make(2);
  torch::manual_seed(1);
  auto state = torch::rand({1});
  torch::manual_seed(1);
  a.training_batch(0); // an earlier batch changes nothing
  CHECK(equal(a.training_batch(5), b.training_batch(5)));
  CHECK_FALSE(equal(a.training_batch(5), a.training_batch(6)));
  CHECK_FALSE(equal(a.training_batch(5), c.training_batch(5)));
  // R23: the generators of LibTorch are left alone.
  CHECK(torch::equal(torch::rand({1}), state));
}

TEST_CASE("Held-out batches cover the held-out part evenly",
          "[runtime][data]") {
  // Held out: bytes 100 to 199. Six sequences of 4 + 1 begin at 100 to 195.
  auto data = text_of(count_to(200),
                      {.held_out = 0.5, .sequence_length = 4, .batch_size = 2});
  std::vector<int64_t> begins;
  for (uint64_t i = 0; i < 3; ++i) {
    auto xs = data.held_out_batch(i, 3);
    auto &input = xs.at(0), &target = xs.at(1);
    REQUIRE(input.sizes() == torch::IntArrayRef{2, 4});
    CHECK(torch::equal(target, input + 1));
    for (int64_t b = 0; b < 2; ++b)
      begins.push_back(input[b][0].item<int64_t>());
  }
  CHECK(begins == std::vector<int64_t>{100, 119, 138, 157, 176, 195});
}

TEST_CASE("One held-out sequence is the first one", "[runtime][data]") {
  std::string bytes = "abcdefghij";
  auto data = text_of(bytes,
                      {.held_out = 0.5, .sequence_length = 3, .batch_size = 1});
  auto xs = data.held_out_batch(0, 1);
  auto &input = xs.at(0), &target = xs.at(1);
  CHECK(row(input, 0) == "fgh");
  CHECK(row(target, 0) == "ghi");
}

// -- tokens -------------------------------------------------------------------

namespace {

/// 0, 1, 2, ... as tokens of this type.
template <class T>
std::string counting_file(size_t n) {
  std::string result;
  for (size_t i = 0; i < n; ++i) {
    auto x = static_cast<T>(i);
    result.append(reinterpret_cast<const char*>(&x), sizeof(T));
  }
  return result;
}

} // namespace

TEST_CASE("Tokens of two or four bytes become sequences like those of a text",
          "[runtime][data]") {
  const bool wide = GENERATE(false, true);
  CAPTURE(wide);
  temporary_file file{wide ? counting_file<uint32_t>(1000)
                           : counting_file<uint16_t>(1000)};
  smp::token_sequences data{file.path(),
                            {.token_size = wide ? 4u : 2u,
                             .vocabulary = 1000,
                             .held_out = 0.2,
                             .sequence_length = 7,
                             .batch_size = 5}};
  auto xs = data.training_batch(3);
  REQUIRE(xs.size() == 2);
  CHECK(xs[0].sizes() == torch::IntArrayRef{5, 7});
  CHECK(torch::equal(xs[1], xs[0] + 1));
  CHECK(torch::equal(xs[0].select(1, 0) + 6, xs[0].select(1, 6)));
  CHECK(xs[1].max().item<int64_t>() < 800);
  CHECK(equal(xs, data.training_batch(3)));
  CHECK_FALSE(equal(xs, data.training_batch(4)));
  // The held-out part from its first token to its last.
  auto first = data.held_out_batch(0, 2);
  auto last = data.held_out_batch(1, 2);
  CHECK(first[0][0][0].item<int64_t>() == 800);
  CHECK(last[1][4][6].item<int64_t>() == 999);
}

TEST_CASE("A file that holds no such tokens is refused with the place",
          "[runtime][data]") {
  smp::token_sequences::options x{
    .token_size = 2, .vocabulary = 50, .sequence_length = 4, .batch_size = 2};
  CHECK_THAT(message_of([&] { smp::token_sequences("/nowhere/t.bin", x); }),
             ContainsSubstring("/nowhere/t.bin: No such file"));
  temporary_file empty{""};
  CHECK_THAT(message_of([&] { smp::token_sequences(empty.path(), x); }),
             ContainsSubstring(empty.path() + ": is empty"));
  temporary_file odd{"abc"};
  CHECK_THAT(message_of([&] { smp::token_sequences(odd.path(), x); }),
             ContainsSubstring("has 3 bytes, no multiple of the 2"));
  temporary_file few{counting_file<uint16_t>(20)};
  CHECK_THAT(message_of([&] { smp::token_sequences(few.path(), x); }),
             ContainsSubstring("the held-out part has 2 tokens, but "
                               "data.sequence_length = 4 needs at least 5"));
  temporary_file large{counting_file<uint16_t>(100)};
  smp::token_sequences data{large.path(), x};
  CHECK_THAT(message_of([&] { data.held_out_batch(0, 1); }),
             ContainsSubstring("token 90 at position 90 is not below "
                               "model.vocabulary = 50"));
}

TEST_CASE("A model of the user's gets any token, a built-in one its vocabulary",
          "[runtime][data]") {
  temporary_file file{counting_file<uint16_t>(1000)};
  smp::train_config x;
  x.data.type = "tokens";
  x.data.path = file.path();
  x.data.sequence_length = 4;
  x.data.batch_size = 2;
  for (auto type : {"torchscript", "plugin"}) {
    x.model.type = type;
    auto last = smp::make_data(x)->held_out_batch(1, 2);
    CHECK(last.at(1).max().item<int64_t>() == 999);
  }
  x.model.type = "gpt";
  CHECK_THAT(message_of([&] { smp::make_data(x)->held_out_batch(1, 2); }),
             ContainsSubstring("is not below model.vocabulary = 256"));
}

// -- parts --------------------------------------------------------------------

namespace {

/// All parts together are the batch, in the order of replicas.
void check_parts(const smp::data_source& data) {
  auto together = [](auto batch_of) {
    std::vector<torch::Tensor> inputs, targets;
    for (uint64_t i = 0; i < 3; ++i) {
      auto xs = batch_of(smp::batch_part{i, 3});
      REQUIRE(xs.size() == 2);
      inputs.push_back(xs[0]);
      targets.push_back(xs[1]);
    }
    return smp::batch{torch::cat(inputs), torch::cat(targets)};
  };
  CHECK(equal(together([&](auto part) { return data.training_batch(4, part); }),
              data.training_batch(4)));
  if (data.has_held_out())
    CHECK(equal(
      together([&](auto part) { return data.held_out_batch(1, 2, part); }),
      data.held_out_batch(1, 2)));
}

} // namespace

TEST_CASE("Replicas divide the batch without overlap or gap",
          "[runtime][data]") {
  check_parts(text_of(count_to(250), {.sequence_length = 7, .batch_size = 6}));
  temporary_file tokens{counting_file<uint16_t>(1000)};
  check_parts(smp::token_sequences{tokens.path(),
                                   {.token_size = 2,
                                    .vocabulary = 1000,
                                    .sequence_length = 7,
                                    .batch_size = 6}});
  temporary_file fixed{""};
  smp::write_safetensors(
    fixed.path(),
    {{"input0", torch::arange(12).view({6, 2})}, {"input1", torch::arange(6)}});
  check_parts(*smp::make_fixed_batch(fixed.path(), 1, 3));
}

TEST_CASE("A replica reads no sample of another one", "[runtime][data]") {
  // Two held-out sequences, of tokens 90 to 94 and 95 to 99.
  temporary_file file{counting_file<uint16_t>(100)};
  smp::token_sequences data{
    file.path(),
    {.token_size = 2, .vocabulary = 95, .sequence_length = 4, .batch_size = 2}};
  CHECK(data.held_out_batch(0, 1, {0, 2})[1].max().item<int64_t>() == 94);
  CHECK_THAT(message_of([&] {
               data.held_out_batch(0, 1, {1, 2});
             }),
             ContainsSubstring("token 95 at position 95"));
}

// -- a fixed batch ------------------------------------------------------------

namespace {

/// A safetensors file that goes with this object.
struct tensor_file : temporary_file {
  explicit tensor_file(const smp::named_tensors& xs) : temporary_file("") {
    smp::write_safetensors(path(), xs);
  }
};

} // namespace

TEST_CASE("A fixed batch has the file's tensors by number, afresh each time",
          "[runtime][data]") {
  auto a = torch::arange(12).view({4, 3});
  auto b = torch::ones({4}, torch::kDouble);
  auto c = torch::arange(8).view({2, 4}).to(torch::kBool);
  tensor_file file{{{"input1", b}, {"input2", c}, {"input0", a}}};
  auto data = smp::make_fixed_batch(file.path(), 2);
  CHECK(data->batch_size() == 4);
  CHECK_FALSE(data->has_held_out());
  for (uint64_t step : {0, 7}) {
    auto xs = data->training_batch(step);
    REQUIRE(xs.size() == 3);
    CHECK(torch::equal(xs[0], a));
    CHECK(torch::equal(xs[1], b));
    CHECK(xs[1].scalar_type() == torch::kDouble);
    CHECK(torch::equal(xs[2], c));
    xs[0].zero_(); // a model may do so
  }
}

TEST_CASE("A file that is not a batch is refused with tensor and reason",
          "[runtime][data]") {
  auto refused = [](const smp::named_tensors& xs) {
    tensor_file file{xs};
    auto text = message_of([&] { smp::make_fixed_batch(file.path(), 2); });
    CHECK_THAT(text, ContainsSubstring(file.path()));
    return text;
  };
  auto x = torch::ones({4, 3});
  CHECK_THAT(refused({}), ContainsSubstring("has no tensor"));
  CHECK_THAT(refused({{"x", x}}), ContainsSubstring("none called input0"));
  CHECK_THAT(refused({{"input0", x}, {"input2", x}}),
             ContainsSubstring("none called input1"));
  CHECK_THAT(refused({{"input0", x}, {"input1", torch::tensor(1.0)}}),
             ContainsSubstring("input1 is a scalar"));
  CHECK_THAT(refused({{"input0", x}, {"input1", torch::ones({3})}}),
             ContainsSubstring("dim 0 of input1 is 3, which cannot be divided "
                               "into smp.microbatches = 2"));
  CHECK_THAT(message_of([] { smp::make_fixed_batch("/nowhere/x"); }),
             ContainsSubstring("/nowhere/x"));
}
