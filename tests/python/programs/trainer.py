"""transformers' Trainer on a small GPT-2, as its run_clm uses it. It knows the
withdrawn product, so nothing here names smp.

python trainer.py FOLDER [--resume_from_checkpoint FOLDER/checkpoint-3] ...
"""

import dataclasses
import functools
import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.utils import is_sagemaker_mp_enabled

TEXT = "It was the best of times, it was the worst of times. " * 40


@dataclasses.dataclass
class OnAnyMachine(TrainingArguments):
    """With the withdrawn product transformers always takes a GPU."""

    @functools.cached_property
    def _setup_devices(self):
        if is_sagemaker_mp_enabled() and not torch.cuda.is_available():
            self.distributed_state, self._n_gpu = None, 0
            return torch.device("cpu")
        return super()._setup_devices


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            rate = logs["learning_rate"]
            print(
                f"loss {state.global_step} {logs['loss']:.4f} rate {rate:.6g}"
            )


def blocks(length, first, n):
    ids = [ord(c) % 64 for c in TEXT]
    for i in range(first, first + n):
        x = ids[i * 7 : i * 7 + length]
        yield {"input_ids": x, "labels": x, "attention_mask": [1] * length}


def main():
    parser = HfArgumentParser(OnAnyMachine)
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=4,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=list(blocks(32, 0, 48)),
        eval_dataset=list(blocks(32, 50, 16)),
        data_collator=default_data_collator,
        callbacks=[Print()],
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"test loss {metrics['eval_loss']:.5f}")
        saved = GPT2LMHeadModel.from_pretrained(args.output_dir)
        norm = sum(p.double().pow(2).sum() for p in saved.parameters()).sqrt()
        print(f"norm {norm.item():.6f}")


if __name__ == "__main__":
    sys.exit(main())
