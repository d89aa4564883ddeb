"""Writes models of the installed version of transformers: python3 export.py

MODEL_VERSION.pt and one batch of 8 rows beside it, for layers whose code differs
from that of the version that tests/zoo pins. A version that traces no GPT-2
with this PyTorch writes none.
"""

import warnings

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

warnings.filterwarnings("ignore")

WORDS, WIDTH, LENGTH, ROWS = 29, 12, 6, 8


class Loss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, return_dict=False)[0]


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=2, n_inner=24, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))  # fmt: skip


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(
        vocab_size=WORDS, max_position_embeddings=8, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0))  # fmt: skip


def save(script, path: str):
    """Saves without the debug records: they name files of this machine."""
    script.save(path)
    reader = torch._C.PyTorchFileReader(path)
    records = {x: reader.get_record(x) for x in reader.get_all_records()}
    writer = torch._C.PyTorchFileWriter(path)
    for record, data in records.items():
        if not record.endswith(".debug_pkl") and record not in ("version", "byteorder", ".data/serialization_id"):
            writer.write_record(record, data, len(data))
    writer.write_end_of_file()


def main():
    version = "_".join(transformers.__version__.split(".")[:2])
    for make in (gpt2, bert):
        torch.manual_seed(1)
        words = torch.randint(2, WORDS, (ROWS, LENGTH))
        batch = [words, torch.ones_like(words), words.clone()]
        try:
            script = torch.jit.trace(Loss(make()).train(), tuple(batch), check_trace=False)
        except (IndexError, RuntimeError) as e:
            print(f"{make.__name__}_{version}: {e}")
            continue
        save(script, f"{make.__name__}_{version}.pt")
        save_file({f"input{i}": x for i, x in enumerate(batch)}, f"{make.__name__}_{version}.batch.safetensors")


if __name__ == "__main__":
    main()
