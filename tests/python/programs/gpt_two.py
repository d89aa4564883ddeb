"""gpt_one.py over two ranks: ten lines are different.

python -m smp.run -n 2 gpt_two.py FOLDER
"""

import math
import os
import sys
from contextlib import nullcontext

import smp
import torch
from small_gpt import GPT, GPTConfig

out_dir = sys.argv[1]
eval_interval, eval_iters, log_interval = 4, 2, 1
gradient_accumulation_steps = 2
batch_size, block_size = 8, 32
learning_rate, min_lr = 1e-2, 1e-3
max_iters, warmup_iters = 8, 2
weight_decay, beta1, beta2, grad_clip = 0.1, 0.9, 0.95, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "float32"

smp.init(pipeline_parallel_degree=2, microbatches=4)
torch.manual_seed(1337)
ctx = (
    nullcontext()
    if dtype == "float32"
    else torch.autocast(device, getattr(torch, dtype))
)
text = "It was the best of times, it was the worst of times. " * 60
data = torch.tensor([ord(c) % 64 for c in text])
generator = torch.Generator().manual_seed(1)


def get_batch(split):
    half = len(data) // 2
    part = data[:half] if split == "train" else data[half:]
    ix = torch.randint(
        len(part) - block_size, (batch_size,), generator=generator
    )
    x = torch.stack([part[i : i + block_size] for i in ix])
    y = torch.stack([part[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


model = GPT(GPTConfig(block_size=block_size))
model = smp.DistributedModel(model)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = model.configure_optimizers(
    weight_decay, learning_rate, (beta1, beta2)
)
optimizer = smp.DistributedOptimizer(optimizer)


@smp.step
def compute(X, Y):
    with ctx:
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
    return model.training and model.backward(loss) or loss


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            loss = compute(X, Y).reduce_mean() * gradient_accumulation_steps
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
    return min_lr + coeff * (learning_rate - min_lr)


X, Y = get_batch("train")
for iter_num in range(max_iters + 1):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"test loss {iter_num} {losses['val']:.6f}")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iter_num": iter_num,
        }
        smp.save(checkpoint, os.path.join(out_dir, "ckpt.pt"), partial=False)
    for micro_step in range(gradient_accumulation_steps):
        loss = compute(X, Y).reduce_mean()
        X, Y = get_batch("train")
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"loss {iter_num} {lossf:.6f}")
