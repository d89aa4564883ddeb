// ctest: label=multiprocess

#include "tests/support/catch.hpp"

#include "runtime/config/config_file.hpp"
#include "runtime/train/trainable.hpp"
#include "tests/support/runs/train_dir.hpp"
#include "tests/support/torch/numbers.hpp"
#include "tests/support/torch/plain_gpt.hpp"
#include "transport/files/file_descriptor.hpp"

#include <ATen/core/grad_mode.h>
#include <torch/nn/functional/loss.h>

#include <string>
#include <vector>

#include <sys/inotify.h>
#include <unistd.h>

// A run of processes that begins with what another one saved.

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
using namespace smp::test;

namespace {

const std::string more = R"([optimizer]
lr = 1e-2

[train]
steps = 20
eval_steps = 0
save_model = true
)";

struct init_run : train_dir {
  init_run() : train_dir(tiny_gpt(2, 2, 4, more)) {
    // Measured, it would be one rank's.
    run({"tiny.toml", "--run-dir", "first", "--smp.trace_device=none"});
  }

  std::string file() const {
    return (path / "first/model.safetensors").string();
  }

  /// The loss of the first batch with the saved weights, by torch alone.
  double loss_of_saved() const {
    at::NoGradGuard no_grad;
    plain_gpt model{256, 16, 2, 2, 16, 0};
    auto saved = all_of(file());
    for (auto& [name, x] : model.named())
      x.copy_(saved.at(name));
    auto config = smp::load_config((path / "tiny.toml").string());
    auto batch = smp::make_data(config)->training_batch(0);
    return torch::nn::functional::cross_entropy(
             model.forward(batch.at(0)).flatten(0, 1), batch.at(1).flatten())
      .item<double>();
  }
};

} // namespace

TEST_CASE_METHOD(init_run, "a run begins with what another one saved",
                 "[apps][train]") {
  // A path on the command line begins where the command runs.
  CHECK_THAT(run({"tiny.toml", "--run-dir", "second", "--train.steps=1",
                  "--smp.trace_device=none",
                  "--train.init_from=first/model.safetensors"}),
             ContainsSubstring("weights   parameters and buffers from " + file()
                               + "\n"));
  auto before = metrics("first").at(0)["loss"].get<double>();
  auto loss = metrics("second").at(0)["loss"].get<double>();
  CHECK(loss == Approx(loss_of_saved()).epsilon(1e-4));
  CHECK(loss < before - 0.1);
  CHECK_THAT(
    run({"verify", "tiny.toml", "--steps", "2", "--split",
         "--smp.bf16_params=true", "--run-dir", "compared",
         "--train.init_from=first"}),
    ContainsSubstring("weights   from " + (path / "first").string() + "\n")
      && ContainsSubstring("equal: 2 steps"));
}

TEST_CASE_METHOD(init_run, "a file that does not fit ends run and check alike",
                 "[apps][train][check]") {
  const std::string from = "--train.init_from=" + file();
  CHECK_THAT(run({"check", "tiny.toml", from}), ContainsSubstring("no errors"));
  for (std::string what : {"check", "train"}) {
    INFO(what);
    auto told = [&](std::vector<std::string> options) {
      if (what == "check")
        options.insert(options.begin(), "check");
      return run(options, 2);
    };
    CHECK_THAT(told({"tiny.toml", from, "--model.layers=3"}),
               ContainsSubstring("cannot load " + file() + ": 12 missing (")
                 && ContainsSubstring("'transformer.h.2.ln_1.weight'")
                 && ContainsSubstring("; nothing was loaded\n"));
    CHECK_THAT(told({"tiny.toml", "--train.init_from=text.txt"}),
               ContainsSubstring((path / "text.txt").string() + ": "));
    CHECK_THAT(told({"tiny.toml", "--train.init_from=none"}),
               ContainsSubstring("command line: train.init_from = \"none\" is "
                                 "neither a file nor a folder; looked for "
                                 + (path / "none").string() + "\n"));
  }
}

TEST_CASE_METHOD(init_run, "a check opens the file of weights once",
                 "[apps][check]") {
  smp::file_descriptor watch{::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)};
  REQUIRE(watch.get() >= 0);
  // The ends, too: openings that follow each other would be told as one.
  REQUIRE(::inotify_add_watch(watch.get(), file().c_str(), IN_OPEN | IN_CLOSE)
          >= 0);
  run({"check", "tiny.toml", "--train.init_from=" + file()});
  int opened = 0;
  alignas(inotify_event) char buffer[4096];
  for (ssize_t n; (n = ::read(watch.get(), buffer, sizeof(buffer))) > 0;)
    for (ssize_t i = 0; i < n;) {
      auto* event = reinterpret_cast<const inotify_event*>(buffer + i);
      opened += (event->mask & IN_OPEN) != 0 ? 1 : 0;
      i += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  CHECK(opened == 1);
}

TEST_CASE_METHOD(init_run, "a checkpoint wins over a file of weights",
                 "[apps][train][checkpoint]") {
  const std::string from = "--train.init_from=text.txt"; // no weights at all
  run({"tiny.toml", "--run-dir", "begin", "--train.steps=1",
       "--checkpoint.dir=checkpoints", "--train.init_from=" + file()});
  CHECK_THAT(run({"check", "tiny.toml", "--checkpoint.dir=checkpoints", from}),
             ContainsSubstring("no errors"));
  CHECK_THAT(run({"tiny.toml", "--run-dir", "rest", "--train.steps=2",
                  "--checkpoint.dir=checkpoints", from}),
             ContainsSubstring("weights   of the checkpoint, not of "
                               + (path / "text.txt").string() + "\n"));
  CHECK(metrics("rest").size() == 1);
}
