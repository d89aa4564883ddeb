#include "tests/support/catch.hpp"

#include "runtime/placement/module_times.hpp"
#include "tests/support/scratch_dir.hpp"

#include <nlohmann/json.hpp>

#include <string>

using namespace smp;
using namespace smp::test;

TEST_CASE("Times are written for names that are not UTF-8, too",
          "[runtime][session]") {
  model_info model(2);
  model[0].type = "net";
  model[0].children = {module_id{1}};
  model[0].compute = 0.5;
  model[1].path = "caf\xe9"; // Latin-1
  model[1].type = "layer";
  model[1].compute = 0.25;
  scratch_dir dir;
  const auto file = (dir.path / "times.json").string();
  write_module_times(file, model);
  auto modules = nlohmann::json::parse(dir.read("times.json")).at("modules");
  CHECK(modules.size() == 2);
  CHECK(modules.at("").at("seconds") == 0.5);
  CHECK(modules.at("caf\xef\xbf\xbd").at("seconds") == 0.25);
  CHECK(read_module_times(file).modules.size() == 2);
}
