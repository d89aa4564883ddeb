// A language model whose layers tensor-parallel ranks share:
//   shared_transformer --ranks 2
//
// It learns rows of numbers, each of which follows from the previous one. Each
// rank has rows of its own, and a part of each layer. With any number of ranks
// that divides the heads, the losses are the same.

#include "smp/nn.hpp"
#include "smp/smp.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <string>

constexpr int64_t words = 23;
constexpr int64_t length = 16;
constexpr int64_t batch = 64;

/// @returns [batch, length + 1]
torch::Tensor make_rows() {
  auto rows = torch::randint(words, {batch, length + 1});
  for (int64_t i = 1; i <= length; ++i)
    rows.select(1, i).copy_((5 * rows.select(1, i - 1) + 3) % words);
  return rows;
}

int main(int argc, char** argv) {
  smp::init(argc, argv); // --ranks 2: starts itself as two processes
  const uint64_t ranks = argc > 2 ? std::stoul(argv[2]) : 1;
  smp::session session{
    {.microbatches = 2, .ddp = ranks > 1, .tensor_parallel_degree = ranks}};
  smp::nn::transformer_lm_head_arguments sizes;
  sizes.num_layers = 2;
  sizes.num_attention_heads = 8;
  sizes.attention_head_size = 16;
  sizes.hidden_size = 128;
  sizes.intermediate_size = 512;
  sizes.vocab_size = words;
  sizes.num_positions = length;
  sizes.causal_mask_size = length;
  sizes.pre_layernorm = true;
  sizes.post_layernorm = false;
  sizes.attention_dropout_prob = sizes.hidden_dropout_prob = 0;
  torch::manual_seed(1); // every rank makes the same model
  smp::distributed_model model{smp::nn::distributed_transformer_lm_head{sizes}};
  torch::optim::Adam adam{model->parameters(), 2e-3};
  smp::distributed_optimizer optimizer{adam};

  auto train_step = smp::step([&](torch::Tensor rows) {
    // No rank ever has the scores of all words.
    auto loss = model->loss(rows.narrow(1, 0, length),
                            rows.narrow(1, 1, length));
    model.backward(loss);
    return loss;
  });

  for (int i = 1; i <= 50; ++i) {
    auto mine = make_rows().chunk(smp::dp_size())[smp::dp_rank()];
    optimizer.zero_grad();
    auto loss = train_step(mine).reduce_mean();
    auto mean = smp::allreduce(loss, smp::comm_group::dp, smp::reduce_op::mean);
    optimizer.step();
    if (session.rank() == 0 && i % 10 == 0)
      fmt::print("step {}: loss {:.3f}\n", i, mean.item<double>());
  }
}
