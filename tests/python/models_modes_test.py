# ctest: seconds=130 label=proof
"""The models of models_test.py in other modes, on more ranks, and with a third of
their modules anywhere: by cost they are in a few places only."""

import models_test  # noqa: F401 -- its cases
from harness import ranks, run

# Ranks that share modules have to make the same calls: no experts that samples
# choose.
SHARED = "gpt2", "llama_with_tied_embeddings", "qwen2", "gemma", "bert", "t5"
SHARED += "bart", "vit", "clip", "llava", "gpt2_with_dropout"

if __name__ == "__main__":
    run(
        ranks(2, static_mode=True, fast_mode=True, steps=8, places=1),
        ranks(2, deterministic_server=True, places=2),
        ranks(2, fast_mode=False, pipeline="1f1b", places=4),
        ranks(4, pipeline_parallel_degree=4, places=5),
        ranks(4, ddp=True, places=6),
        ranks(
            4,
            *SHARED,
            ddp=True,
            tensor_parallel_degree=2,
            places=7,
            **{"tensor_parallel.modules": "['*']"},
        ),
    )
