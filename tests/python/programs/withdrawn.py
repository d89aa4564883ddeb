"""A script in the documented style of the withdrawn product, imports unchanged.

python -m smp.run -n 2 withdrawn.py FOLDER [resume]
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR

import smdistributed.modelparallel.torch as smp


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.fc1 = nn.Linear(16 * 5 * 5, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


@smp.step
def train_step(model, scaler, data, target):
    with torch.autocast("cpu", enabled=False):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    scaled_loss = scaler.scale(loss)
    model.backward(scaled_loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def batches(n, first=0):
    g = torch.Generator().manual_seed(first)
    for _ in range(n):
        yield (
            torch.randn(16, 1, 14, 14, generator=g),
            torch.randint(0, 10, (16,), generator=g),
        )


def main():
    smp.init()
    torch.manual_seed(7)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
    folder, resume = sys.argv[1], sys.argv[2:] == ["resume"]

    model = GroupedNet()
    model = smp.DistributedModel(
        model, trace_device="cpu", gradient_as_bucket_view=True
    )
    scaler = smp.amp.GradScaler(init_scale=4.0)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.7)
    if resume:
        content = smp.resume_from_checkpoint(folder, partial=True)
        assert content["args"] == {"lr": 0.5}, content
        found = smp.load(os.path.join(folder, "rest.pt"), partial=True)
        scheduler.load_state_dict(found["scheduler"])
        scaler.load_state_dict(found["scaler"])

    model.train()
    for i, (data, target) in enumerate(batches(6)):
        if resume and i < 3:
            continue
        optimizer.zero_grad()
        _, loss_mb = train_step(model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if smp.rank() == 0:
            print(f"loss {i} {loss.item():.6f}")
        if i == 2 and not resume:
            smp.save_checkpoint(
                folder,
                tag=f"total_steps{i + 1}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content={"args": {"lr": 0.5}},
            )
            rest = {
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
            }
            if smp.dp_rank() == 0:
                smp.save(rest, os.path.join(folder, "rest.pt"), partial=True)

    model.eval()
    loss, correct = 0.0, 0
    for data, target in batches(2, first=9):
        loss_mb, correct_mb = test_step(model, data, target)
        loss += sum(loss_mb.outputs)
        correct += sum(correct_mb.outputs)
    if smp.mp_rank() == 0:
        smp.broadcast((loss, correct), smp.MP_GROUP)
    else:
        told = smp.recv_from(0, rank_type=smp.RankType.MP_RANK)
        assert told == (loss, correct), told
    smp.save_checkpoint(
        folder, "whole.pt", partial=False, model=model, user_content=[1]
    )
    if smp.rank() == 0:
        print(f"test loss {loss:.5f}, {correct} right")
        whole = torch.load(os.path.join(folder, "whole.pt"))
        GroupedNet().load_state_dict(whole)
    smp.barrier()


if __name__ == "__main__":
    main()
