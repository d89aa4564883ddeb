#include "tests/support/catch.hpp"

#include "runtime/checkpoint/weight_files.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"

#include <ATen/ATen.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

// A model in one safetensors file or in several with an index.

using namespace smp;
using namespace smp::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Two files of a model, in a folder of their own.
struct two_files : scratch_dir {
  two_files() {
    std::filesystem::create_directory(folder());
    write_safetensors(file("a.safetensors"), {{"z", z}, {"unnamed", x}});
    write_safetensors(file("b.safetensors"), {{"x", x}, {"y", y}});
  }

  std::string folder() const {
    return path / "model";
  }

  std::string file(const std::string& name) const {
    return path / "model" / name;
  }

  std::string index() const {
    return file("model.safetensors.index.json");
  }

  void write_index(const std::string& text) const {
    write("model/model.safetensors.index.json", text);
  }

  /// What it says if `text` is the index.
  std::string refusal(const std::string& text) const {
    write_index(text);
    auto result = error_of([&] { weight_files{folder()}; }, error_code::config);
    CHECK_THAT(result, ContainsSubstring("cannot read " + index() + ": "));
    return result;
  }

  at::Tensor x = at::arange(6, at::kFloat).view({3, 2});
  at::Tensor y = at::arange(4, at::kDouble) * 0.5;
  at::Tensor z = at::scalar_tensor(7, at::kInt);
};

constexpr const char* good_index
  = R"({"metadata": {"total_size": 60}, "weight_map": {"x": "b.safetensors",
        "y": "b.safetensors", "z": "a.safetensors"}})";

std::vector<std::string> names_of(const weight_files& files) {
  std::vector<std::string> result;
  for (auto& x : files.tensors())
    result.push_back(x.name);
  return result;
}

size_t position_in(const weight_files& files, const std::string& name) {
  size_t result = 0;
  while (files.tensors().at(result).name != name)
    ++result;
  return result;
}

} // namespace

TEST_CASE("Several files with an index are read as one", "[runtime][state]") {
  two_files dir;
  dir.write_index(good_index);
  for (auto& path : {dir.folder(), dir.folder() + "/", dir.index()}) {
    INFO(path);
    weight_files files{path};
    // File by file, by the order of data, in which doubles come first.
    REQUIRE(names_of(files) == std::vector<std::string>{"z", "y", "x"});
    auto read = [&](const char* name) {
      return files.read(position_in(files, name));
    };
    CHECK(at::equal(read("x"), dir.x));
    CHECK(at::equal(read("y"), dir.y));
    CHECK(at::equal(read("z"), dir.z));
    CHECK(at::equal(files.read_rows(position_in(files, "x"), 1, 2),
                    dir.x.narrow(0, 1, 2)));
    CHECK(files.tensors()[position_in(files, "y")].dtype == at::kDouble);
  }
}

TEST_CASE("A folder with one file is read as that file", "[runtime][state]") {
  two_files dir;
  // As caches of Hugging Face have it; and the index does not count.
  REQUIRE(::symlink("b.safetensors", dir.file("model.safetensors").c_str())
          == 0);
  dir.write_index("no index");
  for (auto& path : {dir.folder(), dir.file("model.safetensors")}) {
    INFO(path);
    weight_files files{path};
    CHECK(names_of(files) == std::vector<std::string>{"y", "x"});
    CHECK(at::equal(files.read(1), dir.x));
  }
}

TEST_CASE("An index that is wrong is refused with what is wrong",
          "[runtime][state]") {
  two_files dir;
  const std::pair<const char*, const char*> wrongs[] = {
    {"", "not valid JSON"},
    {R"({"weight_map": {"x": "b.safetensors"})", "not valid JSON"},
    {R"(["weight_map"])", "it has no \"weight_map\""},
    {R"({"metadata": {}})", "it has no \"weight_map\""},
    {R"({"weight_map": ["x"]})", "it has no \"weight_map\""},
    {R"({"weight_map": {"x": 3}})", "'x' is in 3, which is not the name"},
    {R"({"weight_map": {"x": ""}})", "'x' is in \"\", which is not the name"},
    {R"({"weight_map": {"x": ".."}})",
     "'x' is in \"..\", which is not the name"},
    {R"({"weight_map": {"x": "../b.safetensors"}})",
     "'x' is in \"../b.safetensors\", which is not the name of a file beside"},
    {R"({"weight_map": {"x": "/tmp/b.safetensors"}})",
     "'x' is in \"/tmp/b.safetensors\", which is not the name of a file "
     "beside"},
    {R"({"weight_map": {"x": "b.safetensors\u0000"}})",
     "which is not the name"},
    {R"({"weight_map": {"x": "c.safetensors"}})",
     "weight_map: 'x' is in \"c.safetensors\", which is not there"},
    {R"({"weight_map": {"x": "a.safetensors"}})",
     "weight_map: 'x' is in \"a.safetensors\", which does not have it"},
    {R"({"weight_map": {"x": "b.safetensors", "x": "a.safetensors"}})",
     "\"x\" stands twice"},
    {R"({"metadata": [[[[[[[[[[]]]]]]]]]]})", "nested too deep"}};
  for (auto& [text, why] : wrongs) {
    INFO(text);
    CHECK_THAT(dir.refusal(text), ContainsSubstring(why));
  }
}

TEST_CASE("An index that is too long is refused", "[runtime][state]") {
  two_files dir;
  dir.write_index("{}");
  std::filesystem::resize_file(dir.index(), 100'000'001); // no blocks on disk
  CHECK(error_of([&] { weight_files{dir.folder()}; }, error_code::config)
        == "cannot read " + dir.index()
             + ": an index has at most 100000000 bytes");
}

TEST_CASE("What the files of a model are not, is said of the file",
          "[runtime][state]") {
  two_files dir;
  auto told = [&](const std::string& path) {
    return error_of([&] { weight_files{path}; }, error_code::config);
  };
  CHECK(told(dir.folder())
        == "cannot read " + dir.folder()
             + ": the folder has neither model.safetensors nor "
               "model.safetensors.index.json");
  CHECK_THAT(told(dir.file("none.json")),
             ContainsSubstring("cannot read " + dir.file("none.json")));
  CHECK_THAT(told(dir.file("none")),
             ContainsSubstring("cannot read " + dir.file("none")));
  dir.write("model/c.safetensors", "no tensors");
  dir.write_index(R"({"weight_map": {"x": "c.safetensors"}})");
  CHECK_THAT(told(dir.folder()),
             ContainsSubstring("cannot read " + dir.file("c.safetensors")));
}
