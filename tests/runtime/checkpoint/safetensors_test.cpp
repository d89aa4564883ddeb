#include "tests/support/catch.hpp"

#include "runtime/checkpoint/safetensors.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <ATen/ATen.h>

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;
using test::content_of;
namespace fs = std::filesystem;

namespace {

struct scratch : test::scratch_dir {
  std::string file(const char* name = "x.safetensors") const {
    return (path / name).string();
  }

  size_t files() const {
    return static_cast<size_t>(
      std::distance(fs::directory_iterator{path}, fs::directory_iterator{}));
  }
};

void spill(const std::string& path, const std::string& bytes) {
  std::ofstream{path, std::ios::binary} << bytes;
}

/// A file of this header and these bytes, with the length in front.
std::string assemble(const std::string& header, const std::string& data) {
  std::string result(8, '\0');
  uint64_t size = header.size();
  std::memcpy(result.data(), &size, 8);
  return result + header + data;
}

std::string why_unreadable(const std::string& path) {
  auto result = error_of([&] { read_safetensors(path); }, error_code::config);
  CHECK_THAT(result, ContainsSubstring("cannot read " + path + ": ")
                       || Catch::Matchers::Equals("no error"));
  return result;
}

std::string why_unwritable(const std::string& path, const named_tensors& xs,
                           const string_map& metadata = {}) {
  auto result = error_of([&] { write_safetensors(path, xs, metadata); },
                         error_code::config);
  CHECK_THAT(result, ContainsSubstring("cannot write " + path + ": "));
  return result;
}

bool same_bytes(const at::Tensor& x, const at::Tensor& y) {
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes())
    return false;
  auto a = x.contiguous();
  auto b = y.contiguous();
  return x.numel() == 0
         || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes())
              == 0;
}

} // namespace

// -- good files ---------------------------------------------------------------

TEST_CASE("tensors of every dtype of the format survive with their names") {
  scratch s;
  named_tensors xs;
  for (auto dtype :
       {c10::kBool, c10::kByte, c10::kChar, c10::kUInt16, c10::kShort,
        c10::kUInt32, c10::kInt, c10::kUInt64, c10::kLong, c10::kHalf,
        c10::kBFloat16, c10::kFloat, c10::kDouble, c10::kComplexFloat,
        c10::kFloat8_e5m2, c10::kFloat8_e4m3fn, c10::kFloat8_e8m0fnu}) {
    auto x = at::empty({3, 7}, dtype);
    auto seeds = at::randint(0, dtype == c10::kBool ? 2 : 256,
                             {static_cast<int64_t>(x.nbytes())}, c10::kByte);
    std::memcpy(x.data_ptr(), seeds.const_data_ptr(), x.nbytes());
    xs.emplace_back(std::string{"layer."} + c10::toString(dtype), x);
  }
  xs.emplace_back("", at::rand({2, 3}).t());
  xs.emplace_back("scalar \"\xc3\xa4\n", at::scalar_tensor(2.5));
  xs.emplace_back("no elements", at::empty({0, 4}));
  xs.emplace_back("with autograd", at::rand({2}).requires_grad_());
  string_map metadata{{"format", "pt"}, {"", "empty key"}};
  write_safetensors(s.file(), xs, metadata);
  auto file = read_safetensors(s.file());
  CHECK(file.metadata == metadata);
  CHECK(file.tensors.size() == xs.size());
  for (auto& [name, x] : xs) {
    INFO(name);
    auto y = file.find(name);
    REQUIRE(y != nullptr);
    CHECK(same_bytes(x, *y));
    CHECK_FALSE(y->requires_grad());
    CHECK(reinterpret_cast<uintptr_t>(y->const_data_ptr()) % 16 == 0);
  }
  CHECK(file.find("nobody") == nullptr);
  CHECK(s.files() == 1);
}

TEST_CASE("the bytes of a file are those that the format asks for") {
  scratch s;
  auto small = at::arange(3, c10::kByte);
  auto large = at::scalar_tensor(1.0, c10::kDouble);
  write_safetensors(s.file(), {{"small", small}, {"large", large}},
                    {{"k", "v"}});
  // The data begins at a multiple of 8, and the double stands before the bytes.
  std::string header
    = R"({"__metadata__":{"k":"v"},)"
      R"("large":{"data_offsets":[0,8],"dtype":"F64","shape":[]},)"
      R"("small":{"data_offsets":[8,11],"dtype":"U8","shape":[3]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  using namespace std::string_literals;
  CHECK(content_of(s.file())
        == assemble(header, "\0\0\0\0\0\0\xf0\x3f\0\1\2"s));
}

TEST_CASE("rows are read alone, as a tensor or to memory of the caller") {
  scratch s;
  auto x = at::arange(24).view({4, 3, 2});
  write_safetensors(s.file(), {{"other", at::ones({5})}, {"x", x}});
  safetensors_reader file{s.file()};
  auto position = file.find("x");
  REQUIRE(position);
  CHECK(at::equal(file.read_rows(*position, 1, 2), x.narrow(0, 1, 2)));
  std::array<int64_t, 7> row;
  row.fill(-1);
  file.read_rows(*position, 2, 1, row.data());
  CHECK(row == std::array<int64_t, 7>{12, 13, 14, 15, 16, 17, -1});
}

TEST_CASE("a file that another program wrote is read") {
  scratch s;
  spill(s.file(),
        assemble(R"({ "b" : {"dtype":"I16","shape":[2],"data_offsets":[4,8]},
                      "a":{"shape":[1, 1],"data_offsets":[0,4],"dtype":"F32"},
                      "e":{"shape":[7,0],"data_offsets":[4,4],"dtype":"F32"}
                    }   )",
                 std::string{"\0\0\x80\x3f\1\0\xff\xff", 8}));
  auto file = read_safetensors(s.file());
  REQUIRE(file.tensors.size() == 3);
  CHECK(file.tensors[0].first == "a");
  CHECK(file.tensors[1].first == "e");
  CHECK(file.find("a")->sizes() == at::IntArrayRef{1, 1});
  CHECK(file.find("a")->item<float>() == 1);
  CHECK(at::equal(*file.find("b"),
                  at::tensor({1, -1}, at::TensorOptions{c10::kShort})));
  CHECK(file.metadata.empty());
}

TEST_CASE("a file without tensors is a file") {
  scratch s;
  write_safetensors(s.file(), {});
  CHECK(content_of(s.file()) == assemble("{}      ", ""));
  CHECK(read_safetensors(s.file()).tensors.empty());
}

// -- writing safely -----------------------------------------------------------

TEST_CASE("a write that fails leaves the old file and nothing else") {
  scratch s;
  write_safetensors(s.file(), {{"old", at::ones({1})}});
  auto before = content_of(s.file());
  // More than this process may write: the kernel refuses in the middle.
  rlimit old_limit = {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &old_limit) == 0);
  auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  auto limit = old_limit;
  limit.rlim_cur = 10'000;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  auto why = why_unwritable(s.file(), {{"new", at::ones({10'000})}});
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  CHECK_THAT(why, ContainsSubstring("write: File too large"));
  CHECK(content_of(s.file()) == before);
  CHECK(s.files() == 1);
  write_safetensors(s.file(), {{"new", at::ones({10'000})}});
  CHECK(read_safetensors(s.file()).find("new") != nullptr);
  CHECK(s.files() == 1);
}

TEST_CASE("a half-written file of a crashed process is in nobody's way") {
  scratch s;
  auto left = s.file() + ".partial-" + std::to_string(::getpid()) + "-0";
  spill(left, "rubbish");
  write_safetensors(s.file(), {{"x", at::ones({1})}});
  CHECK(read_safetensors(s.file()).tensors.size() == 1);
  CHECK(content_of(left) == "rubbish");
}

TEST_CASE("what the format cannot hold is refused with its name") {
  scratch s;
  auto one = at::ones({1});
  CHECK_THAT(why_unwritable(s.file(), {{"a", one}, {"a", one}}),
             ContainsSubstring("tensor \"a\": this name is taken"));
  CHECK_THAT(why_unwritable(s.file(), {{"__metadata__", one}}),
             ContainsSubstring("this name is taken"));
  CHECK_THAT(
    why_unwritable(s.file(), {{"c", at::ones({1}, c10::kComplexDouble)}}),
    ContainsSubstring("tensor \"c\": the format has no ComplexDouble"));
  CHECK_THAT(why_unwritable(s.file(), {{"s", at::eye(2).to_sparse()}}),
             ContainsSubstring("tensor \"s\": a sparse tensor"));
  CHECK_THAT(why_unwritable(s.file(), {{"u", at::Tensor{}}}),
             ContainsSubstring("tensor \"u\": an undefined tensor"));
  CHECK_THAT(why_unwritable(s.file(), {{"\xff", one}}),
             ContainsSubstring("not valid UTF-8"));
  CHECK_THAT(why_unwritable(s.file("no/such/folder"), {{"a", one}}),
             ContainsSubstring("No such file or directory"));
  CHECK(s.files() == 0);
}

// -- broken files -------------------------------------------------------------

namespace {

struct fault {
  const char* header;
  const char* why;
};
// All of these come before 4 bytes of data.
constexpr fault faults[] = {
  {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})",
   "not valid JSON"},
  {R"([])", "the header is not a JSON object"},
  {R"({"a":3})", "tensor \"a\": its description is not an object"},
  {R"({"a":{"dtype":"F32","shape":[1]}})", "tensor \"a\": dtype, shape"},
  {R"({"a":{"dtype":"F32","shape":[1],"offsets":[0,4]}})",
   "tensor \"a\": has no data_offsets"},
  {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})",
   "tensor \"a\": dtype, shape and data_offsets expected, nothing else"},
  {R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})",
   "tensor \"a\": unknown dtype \"F31\""},
  {R"({"a":{"dtype":6,"shape":[1],"data_offsets":[0,4]}})",
   "tensor \"a\": its dtype is not a string"},
  {R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})",
   "tensor \"a\": its shape is not a list"},
  {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})",
   "tensor \"a\": its shape has a size -1"},
  {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})",
   "tensor \"a\": its shape has a size 1.5"},
  {R"({"a":{"dtype":"F32","shape":[9223372036854775808],
      "data_offsets":[0,4]}})",
   "tensor \"a\": its shape has a size 9223372036854775808"},
  {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],
      "data_offsets":[0,4]}})",
   "tensor \"a\": its shape overflows"},
  {R"({"a":{"dtype":"F32","shape":[0,4294967296,4294967296],
      "data_offsets":[0,0]}})",
   "tensor \"a\": its shape overflows"},
  {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
   "tensor \"a\": its data_offsets hold 4 bytes, its shape needs 8"},
  {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
   "tensor \"a\": its data_offsets [0,8] leave the 4 bytes of data"},
  {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[3,2]}})",
   "tensor \"a\": its data_offsets [3,2] leave"},
  {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})",
   "tensor \"a\": its data_offsets are not two sizes"},
  {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})",
   "tensor \"a\": its data_offsets are not two sizes"},
  {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
       "b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
   "tensor \"b\": its data overlaps"},
  {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
       "b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
   "tensor \"b\": 1 bytes before its data belong to no tensor"},
  {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})",
   "1 bytes at its end belong to no tensor"},
  {R"({})", "4 bytes at its end belong to no tensor"},
  {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
       "a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
   "tensor \"a\": stands twice in the header"},
  {R"({"__metadata__":{"k":1}})", "__metadata__: \"k\" is not a string"},
  {R"({"__metadata__":[]})", "__metadata__ is not an object"},
  {R"({"a":{"dtype":"F32","shape":[[[[1]]]],"data_offsets":[0,4]}})",
   "nested too deep"},
};

} // namespace

TEST_CASE("a broken file is refused with its fault and its tensor") {
  scratch s;
  for (auto& x : faults) {
    INFO(x.header);
    spill(s.file(), assemble(x.header, "data"));
    CHECK_THAT(why_unreadable(s.file()), ContainsSubstring(x.why));
  }
}

TEST_CASE("a file whose header length is wrong is refused") {
  scratch s;
  CHECK_THAT(why_unreadable(s.file()),
             ContainsSubstring(": No such file or directory"));
  CHECK_THAT(why_unreadable(s.path.string()),
             ContainsSubstring(": Is a directory"));
  spill(s.file(), "");
  CHECK_THAT(why_unreadable(s.file()), ContainsSubstring("its 0 bytes"));
  spill(s.file(), "1234567");
  CHECK_THAT(why_unreadable(s.file()), ContainsSubstring("its 7 bytes"));
  spill(s.file(), std::string(8, '\0'));
  CHECK_THAT(why_unreadable(s.file()), ContainsSubstring("not valid JSON"));
  spill(s.file(), std::string(100, '\xff'));
  CHECK_THAT(why_unreadable(s.file()),
             ContainsSubstring("claims a header of 18446744073709551615"));
  spill(s.file(), assemble(std::string(100'000, '['), ""));
  CHECK_THAT(why_unreadable(s.file()), ContainsSubstring("nested too deep"));
}

TEST_CASE("every truncation of a file is refused") {
  scratch s;
  write_safetensors(s.file(), {{"a", at::rand({3})}, {"b", at::ones({2})}});
  auto whole = content_of(s.file());
  for (size_t n = 0; n < whole.size(); ++n) {
    spill(s.file(), whole.substr(0, n));
    CHECK(why_unreadable(s.file()) != "no error");
  }
}
