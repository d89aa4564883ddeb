#include "tests/support/catch.hpp"

#include "apps/report/left_behind.hpp"
#include "tests/support/scratch_dir.hpp"

#include <string>

using namespace smp::app;
using smp::test::scratch_dir;

TEST_CASE("A partition is shown as it was stored", "[apps][report]") {
  scratch_dir dir;
  CHECK(stored_partition(dir.path).is_null());
  dir.write("partition.json", R"({"costs": "measured", "loads": [0.75, 0.25],
    "notes": ["head runs on device 1\u001b[2J"], "nodes": [
    {"name": "model", "type": "a::net_impl", "cost": 1.0, "device": 0,
     "parent": null},
    {"name": "h", "type": "torch.nn.ModuleList", "cost": 0.5, "device": 0,
     "parent": 0},
    {"name": "h.1", "type": "torch::nn::LinearImpl", "cost": 0.25, "device": 1,
     "parent": 1}]})");
  auto text = partition_text(stored_partition(dir.path));
  CHECK(text
        == "measured\n"
           "module                                      type                "
           "    cost  device\n"
           "model                                       net                 "
           " 100.0 %  0\n"
           "  h                                         ModuleList          "
           "  50.0 %  0\n"
           "    1                                       Linear              "
           "  25.0 %  1\n"
           "load of   0  75.0 %\n"
           "          1  25.0 %\n"
           "note: head runs on device 1\xEF\xBF\xBD[2J\n");
}

TEST_CASE("A partition that somebody broke is shown as far as it can be",
          "[apps][report]") {
  scratch_dir dir;
  for (auto* text : {"", "[]", "{\"nodes\": 3}", "{\"nodes\": [1]}", "{"}) {
    dir.write("partition.json", text);
    CHECK(stored_partition(dir.path).is_null());
  }
  dir.write("partition.json", R"({"loads": ["x", 1], "notes": [1], "costs": 2,
    "nodes": [{"parent": 7, "device": "x", "name": []}, {"parent": -1}]})");
  auto text = partition_text(stored_partition(dir.path));
  CHECK(text.find("\n?   ") != std::string::npos);
}

TEST_CASE("The waits of the last stall are kept", "[apps][report]") {
  scratch_dir dir;
  CHECK(stored_waits(dir.path).is_null());
  dir.write("stall.json",
            R"({"text": "rank 0 waits for rank 1", "waits": ["a", 1, "b"]})");
  auto waits = stored_waits(dir.path);
  CHECK(waits["chain"] == "rank 0 waits for rank 1");
  CHECK(waits["all"] == json{"a", "b"});
}
