#include "tests/support/catch.hpp"

#include "runtime/checkpoint/checkpoint_dir.hpp"
#include "runtime/checkpoint/manifest.hpp"
#include "runtime/checkpoint/safetensors.hpp"
#include "runtime/config/config_file.hpp"
#include "runtime/data/data.hpp"
#include "runtime/train/resume_plan.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scratch_dir.hpp"
#include "transport/error.hpp"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

// Samples of the user's, in safetensors files.

using namespace smp;
using namespace smp::test;

using Catch::Matchers::ContainsSubstring;

namespace fs = std::filesystem;

namespace {

using sample_numbers = std::vector<int64_t>;

/// Samples that tell their numbers, `first` and so on: two tensors of one type
/// and another.
named_tensors samples(int64_t first, int64_t rows) {
  auto numbers = torch::arange(first, first + rows);
  return {{"input0", torch::stack({numbers, numbers * 10}, 1)},
          {"input1", numbers.to(torch::kByte)}};
}

/// The numbers of the samples in a batch.
sample_numbers numbers_of(const batch& x) {
  REQUIRE(x.size() == 2);
  REQUIRE(x[1].scalar_type() == torch::kByte);
  auto numbers = x[1].to(torch::kLong);
  // What is in one sample stays together.
  CHECK(torch::equal(x[0], torch::stack({numbers, numbers * 10}, 1)));
  auto* first = numbers.const_data_ptr<int64_t>();
  return {first, first + numbers.numel()};
}

sample_numbers from_to(int64_t first, int64_t end) {
  sample_numbers result(static_cast<size_t>(end - first));
  std::iota(result.begin(), result.end(), first);
  return result;
}

/// All parts of a batch in the order of replicas.
sample_numbers together(uint64_t count,
                        const std::function<batch(batch_part)>& part_of_it) {
  sample_numbers result;
  for (uint64_t i = 0; i < count; ++i) {
    auto part = numbers_of(part_of_it({i, count}));
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

std::string refusal(const std::string& path, row_options x) {
  auto result = error_of([&] { make_row_samples(path, x); },
                         error_code::config);
  CHECK_THAT(result, ContainsSubstring(path));
  return result;
}

} // namespace

TEST_CASE("Training takes each sample once before one comes again",
          "[runtime][data]") {
  scratch_dir dir;
  auto file = dir.path / "x.safetensors";
  write_safetensors(file, samples(0, 20));
  auto data = make_row_samples(file, {.held_out = 0.2, .batch_size = 5});
  CHECK(data->batch_size() == 5);
  CHECK(data->has_held_out());
  sample_numbers taken;
  for (uint64_t step = 0; step < 16; ++step) {
    auto found = numbers_of(data->training_batch(step));
    CHECK(found.size() == 5); // also where a pass ends
    taken.insert(taken.end(), found.begin(), found.end());
  }
  std::set<sample_numbers> orders;
  for (auto pass = taken.begin(); pass != taken.end(); pass += 16) {
    sample_numbers order{pass, pass + 16};
    orders.insert(order);
    std::sort(order.begin(), order.end());
    CHECK(order == from_to(0, 16));
  }
  CHECK(orders.size() == 5);
}

TEST_CASE("The order of samples depends on the seed, and on nothing else",
          "[runtime][data]") {
  scratch_dir dir;
  auto file = dir.path / "x.safetensors";
  write_safetensors(file, samples(0, 50));
  auto data = make_row_samples(file, {.batch_size = 8});
  auto halves = make_row_samples(file, {.batch_size = 4});
  auto other = make_row_samples(file, {.batch_size = 8, .seed = 2});
  // Later steps first: who goes on has made none before.
  for (uint64_t step : {40, 7, 3, 0}) {
    CAPTURE(step);
    auto whole = numbers_of(data->training_batch(step));
    for (uint64_t replicas : {2, 4, 8})
      CHECK(
        together(replicas,
                 [&](auto part) { return data->training_batch(step, part); })
        == whole);
    CHECK(numbers_of(other->training_batch(step)) != whole);
    // A batch of two replicas is one of twice their size.
    auto first = numbers_of(halves->training_batch(2 * step));
    auto second = numbers_of(halves->training_batch(2 * step + 1));
    first.insert(first.end(), second.begin(), second.end());
    CHECK(first == whole);
  }
  auto held_out = numbers_of(data->held_out_batch(1, 2));
  CHECK(together(4, [&](auto part) { return data->held_out_batch(1, 2, part); })
        == held_out);
  CHECK(numbers_of(other->held_out_batch(1, 2)) == held_out);
}

TEST_CASE("The last samples are held out", "[runtime][data]") {
  scratch_dir dir;
  auto file = dir.path / "x.safetensors";
  write_safetensors(file, samples(0, 16));
  auto data = make_row_samples(file, {.held_out = 0.25, .batch_size = 2});
  CHECK(numbers_of(data->held_out_batch(0, 2)) == sample_numbers{12, 13});
  CHECK(numbers_of(data->held_out_batch(1, 2)) == sample_numbers{14, 15});
  CHECK(numbers_of(data->held_out_batch(0, 1)) == sample_numbers{12, 14});
  CHECK(numbers_of(data->held_out_batch(3, 4)) == sample_numbers{15, 15});
}

TEST_CASE("Files of a folder follow each other by name", "[runtime][data]") {
  scratch_dir dir;
  auto file = dir.path / "x.safetensors";
  auto folder = dir.path / "train";
  fs::create_directory(folder);
  write_safetensors(file, samples(0, 24));
  write_safetensors(folder / "b.safetensors", samples(7, 12));
  write_safetensors(folder / "a.safetensors", samples(0, 7));
  write_safetensors(folder / "a2.safetensors", samples(7, 0));
  write_safetensors(folder / "c.safetensors", samples(19, 5));
  dir.write("train/index.json", "{}");
  row_options x{.held_out = 0.125, .batch_size = 3};
  auto one = make_row_samples(file, x), many = make_row_samples(folder, x);
  for (uint64_t step = 0; step < 9; ++step)
    CHECK(numbers_of(many->training_batch(step))
          == numbers_of(one->training_batch(step)));
  CHECK(numbers_of(many->held_out_batch(0, 1)) == sample_numbers{21, 22, 23});
}

namespace {

/// @returns how many bytes this process has read from files
uint64_t bytes_read() {
  std::ifstream in{"/proc/self/io"};
  std::string name;
  uint64_t result = 0;
  in >> name >> result;
  REQUIRE(name == "rchar:");
  return result;
}

} // namespace

TEST_CASE("Of samples a replica reads its own only", "[runtime][data]") {
  scratch_dir dir;
  auto file = dir.path / "x.safetensors";
  constexpr int64_t row = 100'000; // bytes
  auto all = torch::arange(8, torch::kByte).view({8, 1}).expand({8, row});
  write_safetensors(file, {{"input0", all.contiguous()}});
  auto samples = make_row_samples(file, {.held_out = 0.25, .batch_size = 2});
  auto fixed = make_fixed_batch(file, 1, 2);
  auto before = bytes_read();
  auto second = samples->held_out_batch(0, 1, {1, 2}).at(0);
  CHECK(bytes_read() - before < 2 * row);
  CHECK(torch::equal(second, all.narrow(0, 7, 1)));
  before = bytes_read();
  second = fixed->training_batch(0, {1, 2}).at(0);
  CHECK(bytes_read() - before < 5 * row);
  CHECK(torch::equal(second, all.narrow(0, 4, 4)));
}

TEST_CASE("A file that holds no samples is refused with tensor and reason",
          "[runtime][data]") {
  scratch_dir dir;
  auto file = (dir.path / "x.safetensors").string();
  auto refused = [&](const named_tensors& xs, row_options x) {
    write_safetensors(file, xs);
    return refusal(file, x);
  };
  auto x = torch::ones({4, 3});
  row_options two{.batch_size = 2};
  CHECK_THAT(refused({{"input0", x}, {"input1", torch::ones({3})}}, two),
             ContainsSubstring("dim 0 of input1 is 3, but that of input0 is "
                               "4"));
  CHECK_THAT(refused({{"input0", x}, {"input2", x}}, two),
             ContainsSubstring("none called input1"));
  CHECK_THAT(refused({{"input0", x}, {"input1", torch::tensor(1.0)}}, two),
             ContainsSubstring("input1 is a scalar"));
  CHECK_THAT(refused({}, two), ContainsSubstring("has no tensor"));
  CHECK_THAT(refused(samples(0, 10), {.batch_size = 10}),
             ContainsSubstring("has 10 rows, 9 of them for training, but a "
                               "step takes 10 (data.batch_size times "
                               "replicas)"));
  CHECK_THAT(refused(samples(0, 10), {.held_out = 0.6, .batch_size = 5}),
             ContainsSubstring("4 of them for training"));
  CHECK_THAT(refused(samples(0, 10), {.held_out = 1e-20, .batch_size = 2}),
             ContainsSubstring("has 10 rows, of which data.held_out = 1e-20 "
                               "keeps none"));
  CHECK_THAT(refusal("/nowhere/x", two), ContainsSubstring("No such file"));
}

TEST_CASE("Files of a folder that do not fit are refused by name",
          "[runtime][data]") {
  scratch_dir dir;
  auto folder = dir.path.string();
  auto a = folder + "/a.safetensors", b = folder + "/b.safetensors";
  row_options x{.batch_size = 2};
  CHECK_THAT(refusal(folder, x), ContainsSubstring("is a folder without files "
                                                   "*.safetensors"));
  write_safetensors(a, {{"input0", torch::ones({4, 3})}});
  auto refused = [&](const named_tensors& xs) {
    write_safetensors(b, xs);
    auto result = refusal(folder, x);
    CHECK_THAT(result, ContainsSubstring(b + ": ") && ContainsSubstring(a));
    return result;
  };
  CHECK_THAT(refused({{"input0", torch::ones({4, 3}, torch::kDouble)}}),
             ContainsSubstring("a row of input0 is F64 [3], but F32 [3] in"));
  CHECK_THAT(refused({{"input0", torch::ones({4, 3, 1})}}),
             ContainsSubstring("a row of input0 is F32 [3, 1], but F32 [3]"));
  CHECK_THAT(
    refused({{"input0", torch::ones({4, 3})}, {"input1", torch::ones({4})}}),
    ContainsSubstring("has 2 tensors, but"));
  auto fixed = error_of([&] { make_fixed_batch(folder); }, error_code::config);
  CHECK_THAT(fixed, ContainsSubstring(folder
                                      + ": is a folder; "
                                        "data.batch_size has to say"));
}

TEST_CASE("A file is a data set with data.batch_size, and one batch without",
          "[runtime][data]") {
  scratch_dir dir;
  train_config x;
  x.data.type = "safetensors";
  x.data.path = dir.path / "x.safetensors";
  x.data.held_out = 0.25;
  write_safetensors(x.data.path, samples(0, 24));
  CHECK(numbers_of(make_data(x)->training_batch(3)) == from_to(0, 24));
  CHECK_FALSE(make_data(x)->has_held_out());
  x.data.batch_size = 2;
  x.data.shuffle_seed = 5;
  auto data = make_data(x, 3);
  CHECK(data->batch_size() == 6);
  CHECK(numbers_of(data->held_out_batch(0, 1)) == from_to(18, 24));
  auto same = make_row_samples(x.data.path,
                               {.held_out = 0.25, .batch_size = 6, .seed = 5});
  CHECK(numbers_of(data->training_batch(4))
        == numbers_of(same->training_batch(4)));
  x.data.batch_size = 7;
  CHECK_THAT(error_of([&] { make_data(x, 3); }, error_code::config),
             ContainsSubstring("a step takes 21"));
}

TEST_CASE("A checkpoint remembers what the files of a folder hold",
          "[runtime][data][checkpoint]") {
  scratch_dir dir;
  train_config x;
  x.data.type = "safetensors";
  x.data.path = dir.path;
  x.data.batch_size = 2;
  auto a = dir.path / "a.safetensors", b = dir.path / "b.safetensors";
  write_safetensors(a, samples(0, 10));
  write_safetensors(b, samples(10, 5));
  auto settings = [&] { return checkpoint_settings(x, *make_data(x)); };
  auto both = settings();
  CHECK(both.at("bytes of data.path")
        == std::to_string(fs::file_size(a) + fs::file_size(b)));
  CHECK(settings() == both);
  write_safetensors(b, samples(20, 5)); // of the same size
  auto changed = settings();
  CHECK(changed.at("bytes of data.path") == both.at("bytes of data.path"));
  CHECK(changed.at("sampled checksum of data.path")
        != both.at("sampled checksum of data.path"));
  x.data.path = b;
  CHECK(settings().at("bytes of data.path")
        == std::to_string(fs::file_size(b)));
}

TEST_CASE("to go on with data that changed is refused with what differs",
          "[runtime][data][checkpoint]") {
  scratch_dir dir;
  train_config x;
  x.data.type = "text";
  x.data.path = dir.write("text.txt", std::string(3000, 'a'));
  x.data.batch_size = 2;
  x.data.sequence_length = 4;
  x.train.steps = 20;
  x.checkpoint.dir = dir.path / "ckpt";
  auto data = make_data(x);
  checkpoint_manifest saved;
  saved.step = 10;
  saved.settings = checkpoint_settings(x, *data);
  auto place = begin_checkpoint(x.checkpoint.dir, saved.step);
  commit_checkpoint(place, to_json(saved));
  CHECK(plan_resume(x, *data)->step == 10);
  auto elsewhere = x; // the same bytes, as they lie on another machine
  elsewhere.data.path = dir.write("copy.txt", std::string(3000, 'a'));
  CHECK(plan_resume(elsewhere, *make_data(elsewhere))->step == 10);
  dir.write("text.txt", std::string(1500, 'a') + std::string(1500, 'b'));
  auto told = error_of([&] { plan_resume(x, *make_data(x)); },
                       error_code::config);
  CHECK_THAT(
    told, ContainsSubstring("cannot go on from " + place.folder
                            + ": sampled checksum of data.path = ")
            && ContainsSubstring(
              ", there " + saved.settings.at("sampled checksum of data.path")
              + "; " + x.data.path + " was written last, 20")
            && ContainsSubstring(" UTC; write what was there then, or another "
                                 "checkpoint.dir to begin anew"));
  // A checkpoint from before samples were kept.
  saved.settings.erase("sampled checksum of data.path");
  commit_checkpoint(place, to_json(saved));
  CHECK(plan_resume(x, *make_data(x))->step == 10);
  // A run notices a copy of its checkpoint under another name.
  fs::copy(place.folder, dir.path / "ckpt/step-15");
  CHECK_THAT(error_of([&] { plan_resume(x, *data); }, error_code::config),
             ContainsSubstring("/ckpt/step-15: its manifest is that of step 10")
               && ContainsSubstring("without this folder, " + place.folder));
}

// -- files that change while a run reads them ---------------------------------

namespace {

/// Overwrites some bytes in place, and sets another time: a file system may
/// count so coarsely that the times of two writes are equal.
void write_in_place(const fs::path& path, size_t at, const std::string& bytes) {
  std::fstream file{path, std::ios::binary | std::ios::in | std::ios::out};
  file.seekp(static_cast<std::streamoff>(at));
  file << bytes << std::flush;
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::hours{1});
}

} // namespace

TEST_CASE("A file that changes while a run reads it is an error by name",
          "[runtime][data]") {
  scratch_dir dir;
  train_config x;
  x.data.type = GENERATE("text", "tokens", "safetensors");
  CAPTURE(x.data.type);
  x.data.path = dir.path / "data";
  x.data.batch_size = GENERATE(std::optional<uint64_t>{2}, std::nullopt);
  x.data.sequence_length = 4;
  if (x.data.type == "safetensors")
    write_safetensors(x.data.path, samples(0, 200));
  else if (x.data.batch_size)
    std::ofstream{x.data.path} << std::string(400, '\0');
  else
    return;
  auto size = fs::file_size(x.data.path);
  auto data = make_data(x);
  auto reads = [&] {
    return error_of([&] { data->training_batch(7); }, error_code::config);
  };
  CHECK(reads() == "no error");
  SECTION("cut") {
    fs::resize_file(x.data.path, size / 2);
    CHECK_THAT(reads(), ContainsSubstring(x.data.path));
    fs::resize_file(x.data.path, 0);
    CHECK_THAT(reads(), ContainsSubstring(x.data.path));
  }
  SECTION("overwritten in place") {
    write_in_place(x.data.path, size - 8, "12345678");
    CHECK_THAT(reads(), ContainsSubstring(x.data.path + ": holds other bytes"));
  }
  SECTION("touched, or longer, which changes nothing that is read") {
    write_in_place(x.data.path, 0, "");
    CHECK(reads() == "no error");
    write_in_place(x.data.path, size, "12345678");
    CHECK(reads() == "no error");
  }
  SECTION("replaced by another file, which leaves the open one as it was") {
    auto before = data->training_batch(3);
    fs::rename(x.data.path, dir.path / "old");
    std::ofstream{x.data.path} << "something else";
    CHECK(torch::equal(data->training_batch(3)[0], before[0]));
  }
}
