// The program with which docs/tutorial.md ends:
//   tutorial --ranks 2           a pipeline of two ranks
//   tutorial --ranks 4           two replicas of it
//   tutorial --ranks 4 --share   which share the layers of the blocks

#include "tutorial_model.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <string_view>

constexpr int steps = 50, batch = 128, samples = 2048;

/// Which samples a step takes; each epoch has an order of its own.
torch::Tensor rows_of(int step) {
  const int per_epoch = samples / batch;
  auto random = at::make_generator<at::CPUGeneratorImpl>(step / per_epoch);
  return torch::randperm(samples, random).chunk(per_epoch)[step % per_epoch];
}

/// The learning rate: up in ten steps, then down to 0.
double rate_of(int step) {
  return 1e-3 * std::min((step + 1) / 10.0, 1 - double(step) / steps);
}

/// Saves all parameters in one file, as the plain program does.
void save_whole(const smp::named_tensors& values) {
  tutorial::net whole;
  auto parameters = whole->named_parameters();
  torch::NoGradGuard no_grad;
  for (auto& [name, x] : values)
    parameters[name].copy_(x);
  torch::save(whole, "model.pt");
}

int main(int argc, char** argv) {
  smp::init(argc, argv); // --ranks 2: starts itself as two processes
  smp::session_config config{
    .pipeline_parallel_degree = 2, .microbatches = 4, .ddp = true};
  if (argc > 3 && argv[3] == std::string_view{"--share"}) {
    config.tensor_parallel_degree = 2;
    config.tensor_parallel_modules = {"blocks.*"};
  }
  smp::session session{config};

  torch::manual_seed(1); // every rank makes the same model
  smp::distributed_model model{tutorial::net{}};
  auto inputs = torch::randn({samples, 32});
  auto classes = inputs.slice(1, 0, 10).argmax(1); // the largest of the first
  torch::optim::AdamW adamw{model->parameters(), 1e-3};
  smp::distributed_optimizer optimizer{adamw}; // before the first step

  auto train_step = smp::step([&](torch::Tensor x, torch::Tensor y) {
    auto loss = torch::nn::functional::cross_entropy(model(x), y);
    model.backward(loss); // instead of loss.backward()
    return loss;
  });

  int step = 0;
  if (auto from = smp::resume_from_checkpoint("ckpt", model, {&optimizer}))
    step = static_cast<int>(from->step);
  for (; step < steps; ++step) {
    for (auto& group : adamw.param_groups())
      group.options().set_lr(rate_of(step));
    auto rows = rows_of(step).chunk(smp::data_size())[smp::data_rank()];
    auto x = inputs.index_select(0, rows);
    auto y = classes.index_select(0, rows);
    optimizer.zero_grad();
    auto mine = train_step(x, y).reduce_mean(); // of this replica
    auto loss = smp::allreduce(mine, smp::comm_group::dp, smp::reduce_op::mean);
    auto norm = smp::clip_grad_norm_(model, 0.5); // over all ranks
    optimizer.step();
    if (session.rank() == 0 && (step + 1) % 10 == 0)
      std::printf("step %d: loss %.4f, norm %.3f\n", step + 1,
                  loss.item<double>(), norm);
    if ((step + 1) % 20 == 0)
      smp::save_checkpoint("ckpt", step + 1, model, {&optimizer});
  }

  model.partition();                // if there was no step left to make
  auto values = model.state_dict(); // on all ranks together
  if (session.rank() == 0)
    save_whole(values);
}
