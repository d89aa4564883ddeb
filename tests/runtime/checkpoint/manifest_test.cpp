#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checksum.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "tests/support/error_of.hpp"
#include "transport/error.hpp"

#include <nlohmann/json.hpp>

#include <functional>
#include <string>

using namespace smp;
using Catch::Matchers::ContainsSubstring;
using json = nlohmann::json;

namespace {

/// A tensor [4, 6] in two slices and one number, on two ranks.
checkpoint_manifest small() {
  checkpoint_manifest x;
  x.step = 20;
  x.pipeline = 2;
  x.ranks = 2;
  x.drawn_steps = 27;
  x.settings = {{"smp.seed", "1"}};
  x.user_content = {{"epoch", "3, \"third\""}};
  x.partition = {{"", 0}, {"head", 1}};
  x.optimizers = {{.type = "AdamW",
                   .groups = {{{"lr", 0.1}, {"eps", 1e-300}}, {{"lr", 3.0}}},
                   .members = {{"head.weight", 1}}}};
  x.files = {{"model-0.safetensors", 400, 0}, {"model-1.safetensors", 300, 1}};
  x.tensors = {
    {.role = tensor_role::parameter,
     .name = "head.weight",
     .dtype = "F32",
     .shape = {4, 6},
     .pieces = {{"model-0.safetensors", "", 0, {0, 0}, {4, 2}, 1},
                {"model-1.safetensors", "#1", 0, {0, 2}, {4, 4}, ~0ull}}},
    {.role = tensor_role::buffer,
     .name = "count",
     .dtype = "I64",
     .shape = {},
     .pieces = {{"model-0.safetensors", "", 0, {}, {}, 2},
                {"model-1.safetensors", "", 1, {}, {}, 3}}}};
  return x;
}

std::string why(const std::string& text) {
  return test::error_of([&] { parse_manifest(text, "dir/manifest.json"); });
}

/// The manifest with changed content and the checksum of that.
std::string with(const std::function<void(json&)>& change) {
  auto whole = json::parse(to_json(small()));
  change(whole.at("content"));
  auto text = whole.at("content").dump();
  whole["checksum"] = to_hex(checksum(text.data(), text.size()));
  return whole.dump();
}

} // namespace

TEST_CASE("a manifest comes back as it was written", "[runtime][checkpoint]") {
  auto x = small();
  CHECK((parse_manifest(to_json(x), "x") == x));
  CHECK(x.bytes() == 700);
}

TEST_CASE("what ranks wrote of one tensor becomes one tensor",
          "[runtime][checkpoint]") {
  auto whole = small();
  checkpoint_manifest x;
  for (size_t i : {0, 1}) {
    auto parts = whole.tensors;
    for (auto& t : parts)
      t.pieces = {t.pieces[i]};
    x.add(parts);
  }
  CHECK((x.tensors == whole.tensors));
  auto other = whole.tensors;
  other[0].dtype = "F16";
  CHECK_THAT(test::error_of([&] { x.add(other); }),
             ContainsSubstring("'head.weight' in different types or shapes"));
}

TEST_CASE("a manifest that is none, or of another version, is refused by name",
          "[runtime][checkpoint]") {
  for (auto text : {"{}", "[1]", "7", "{\"smp\": 1}"})
    CHECK_THAT(why(text), ContainsSubstring("cannot read dir/manifest.json: ")
                            && ContainsSubstring("not the manifest"));
  CHECK_THAT(why(""), ContainsSubstring("dir/manifest.json: it is damaged"));
  auto whole = json::parse(to_json(small()));
  whole["smp_checkpoint"] = 2;
  CHECK_THAT(why(whole.dump()), ContainsSubstring("version 2")
                                  && ContainsSubstring("reads version 1"));
}

TEST_CASE("a manifest that lost its end or a bit is refused",
          "[runtime][checkpoint]") {
  auto text = to_json(small());
  for (size_t i = 0; i + 2 < text.size(); i += 7)
    CHECK_THAT(why(text.substr(0, i)),
               ContainsSubstring("cannot read dir/manifest.json"));
  for (size_t i = 0; i + 2 < text.size(); ++i) {
    auto other = text;
    other[i] = static_cast<char>(other[i] ^ 1);
    CHECK_THAT(why(other), ContainsSubstring("cannot read dir/manifest.json"));
  }
}

TEST_CASE("a manifest whose pieces do not make up their tensors is refused",
          "[runtime][checkpoint]") {
  auto told = [](const std::function<void(json&)>& change) {
    return why(with(change));
  };
  auto piece = [](json& x) -> json& { return x["tensors"][0]["pieces"][1]; };
  CHECK_THAT(told([&](json& x) {
               piece(x)["begin"] = {0, 3};
             }),
             ContainsSubstring("\"head.weight\": a piece leaves it"));
  CHECK_THAT(told([&](json& x) {
               piece(x)["shape"] = {4, 3};
             }),
             ContainsSubstring("20 of 24 elements"));
  CHECK_THAT(told([&](json& x) { piece(x)["shape"] = {16}; }),
             ContainsSubstring("another number of axes"));
  CHECK_THAT(told([&](json& x) { piece(x)["file"] = "other"; }),
             ContainsSubstring("file 'other' is not listed"));
  CHECK_THAT(told([&](json& x) { x["files"][0]["name"] = "../model"; }),
             ContainsSubstring("file name '../model'"));
  CHECK_THAT(told([&](json& x) { x["tensors"][1] = x["tensors"][0]; }),
             ContainsSubstring("stands twice"));
  CHECK_THAT(told([&](json& x) { x["tensors"][0]["role"] = "guess"; }),
             ContainsSubstring("unknown role"));
  // What the checksum vouches for but smp never wrote.
  const std::string tensor = "tensor \"head.weight\".";
  struct row {
    std::function<void(json&)> change;
    std::string expected;
  };
  for (auto& [change, expected] : std::vector<row>{
         {[](json& x) { x.erase("drawn_steps"); }, "it has no drawn_steps"},
         {[](json& x) { x["step"] = -1; }, "step is -1, not a count"},
         {[](json& x) { x["grid"]["ranks"] = 1.5; },
          "grid.ranks is 1.5, not a count"},
         {[](json& x) { x["partition"][""] = "0"; },
          "partition[\"\"] is \"0\", not a count"},
         {[](json& x) { x["optimizers"][0]["groups"][0]["lr"] = nullptr; },
          "optimizers[0].groups[0][\"lr\"] is null, not a number"},
         {[](json& x) { x["optimizers"] = 7; }, "optimizers is 7, not a list"},
         {[](json& x) { x["files"][1]["bytes"] = -4; },
          "files[1].bytes is -4, not a count"},
         {[](json& x) { x["settings"]["smp.seed"] = 1; },
          "settings[\"smp.seed\"] is 1, not a text"},
         {[&](json& x) {
            piece(x)["begin"] = {-1, 2};
          },
          tensor + "pieces[1].begin[0] is -1, not a count"},
         {[&](json& x) { piece(x)["replica"] = "first"; },
          tensor + "pieces[1].replica is \"first\", not a count"},
         {[&](json& x) { piece(x)["checksum"] = "odd"; },
          tensor + "pieces[1].checksum is \"odd\", not a checksum"},
         {[&](json& x) { piece(x)["checksum"] = std::string(17, 'f'); },
          "not a checksum of 16 hexadecimal digits"}})
    CHECK_THAT(told(change),
               ContainsSubstring("cannot read dir/manifest.json: ")
                 && ContainsSubstring(expected));
}
