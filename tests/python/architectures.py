"""Published architectures, each at a tiny configuration with random weights,
and otherwise unchanged: what ``*_architectures_test.py`` have in common.

A case is called as its class in transformers, or as its model in torchvision or
timm. Nothing is drawn at random in a step: dropout and masks are off.
"""

import inspect

import torch

from harness import case, compare

# Rows that some partitions refuse, and a part of what the error says.
REFUSED = {"ReformerModelWithLMHead": "_seed' of"}

# Gradients of these are what is left of large numbers that cancel each other,
# so that the order in which a sum is made shows.
NOT_ANYWHERE = ["GroupViTModel"]

# -- tiny configurations -------------------------------------------------------
# By the names that configurations have for them. Of a list, as many items.
SIZES = {
    64: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size"
    " d_embed projection_dim entity_emb_size word_embed_proj_dim"
    " lru_width attention_hidden_size",
    128: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff d_inner"
    " dim_feedforward ffn_hidden_size ffn_dim vocab_size"
    " feed_forward_size dim_ff moe_intermediate_size"
    " shared_expert_intermediate_size",
    256: "max_position_embeddings n_positions max_seq_len"
    " max_sequence_length max_source_positions max_target_positions",
    32: "image_size",
    16: "d_kv head_dim kv_channels d_head dim_head state_size num_mel_bins",
    8: "patch_size",
    4: "num_attention_heads n_head n_heads num_heads num_experts"
    " num_local_experts encoder_attention_heads decoder_attention_heads"
    " num_encoder_attention_heads num_decoder_attention_heads",
    2: "num_key_value_heads num_hidden_layers n_layer n_layers num_layers"
    " encoder_layers decoder_layers num_encoder_layers"
    " num_decoder_layers speech_encoder_layers num_experts_per_tok",
    1: "depths",
}
SIZE_OF = {name: n for n, names in SIZES.items() for name in names.split()}
WIDTHS = "hidden_sizes", "embed_dims"


def small(config, **more):
    """What makes a small configuration of that class, with ``more`` in it or in
    its parts."""
    standard, take = config(), {}
    for name in inspect.signature(config.__init__).parameters:
        value = getattr(standard, name, None)
        if hasattr(value, "to_diff_dict") and name not in more:
            more[name] = {}
        if hasattr(value, "to_diff_dict") and isinstance(more[name], dict):
            part = more.pop(name)
            if part.get("model_type", value.model_type) == value.model_type:
                part = small(type(value), **part)
            take[name] = {"model_type": value.model_type, **part}
        elif is_random(name) and isinstance(value, float):
            take[name] = 0.0
        elif is_random(name) and isinstance(value, (list, tuple)):
            take[name] = [0.0] * len(value)
        elif name in WIDTHS and isinstance(value, (list, tuple)):
            take[name] = [16 * 2**i for i in range(len(value))]
        elif name in SIZE_OF and isinstance(value, (list, tuple)):
            take[name] = [SIZE_OF[name]] * len(value)
        elif name in SIZE_OF and value is not None:
            take[name] = SIZE_OF[name]
        elif name.endswith("token_id") and isinstance(value, int):
            take[name] = min(value, 3)
    return {**take, **more}


def is_random(name):
    return any(part in name for part in ("drop", "jitter", "mask_time"))


def known(function, names):
    of = inspect.signature(function).parameters
    return {k: v for k, v in names.items() if k in of}


def loss_of_output(out):
    """The model's own, or one of all that it returns."""
    loss = out.get("loss")
    if loss is not None:
        return loss.mean()
    parts = [x for x in out.values() if torch.is_tensor(x) and x.requires_grad]
    return sum((x - 1).pow(2).mean() for x in parts)


def add(name, make, batch, loss_of):
    """A case that trains what ``make`` returns, on what ``batch`` makes of it
    and of a generator. Steps are compared one by one: the last digit of some
    grows too fast for anything else."""

    def one():
        torch.manual_seed(0)
        net = make()

        def batch_of(i):
            return batch(net, torch.Generator().manual_seed(100 + i))

        anywhere = name not in NOT_ANYWHERE
        try:
            compare(
                net, batch_of, loss_of, 2, each_step=True, anywhere=anywhere
            )
        except RuntimeError as e:
            if REFUSED.get(name, "not refused") not in str(e):
                raise

    one.__name__ = name
    case(one)


def architectures(batch, names, **rows):
    """Rows of transformers: the names of classes, and what is not standard in
    their small configurations."""
    for name, more in {**{n: {} for n in names.split()}, **rows}.items():
        add_transformer(name, batch, more)


def add_transformer(name, batch, more):
    def of_library():
        import transformers

        return getattr(transformers, name)

    def make():
        config = of_library().config_class
        return of_library()(config(**small(config, **more)))

    def batch_of(net, g):
        return known(type(net).forward, batch(net.config, g))

    def loss_of(model, b):
        how = known(
            of_library().forward, {"use_cache": False, "return_loss": True}
        )
        return loss_of_output(model(**b, **how))

    add(name, make, batch_of, loss_of)


# -- batches -------------------------------------------------------------------
def words(g, t=16, n=8):
    return torch.randint(4, 100, (n, t), generator=g)


def random(g, *shape):
    return torch.randn(8, *shape, generator=g)


def classes(g, *shape, n=2):
    return torch.randint(0, n, (8, *shape), generator=g)


def masked(ids):
    mask = torch.ones_like(ids)
    mask[::2, -4:] = 0
    return mask


def text(g):
    ids = words(g)
    return {"input_ids": ids, "attention_mask": masked(ids)}


def language(config, g):
    b = text(g)
    return {
        **b,
        "labels": b["input_ids"].masked_fill(b["attention_mask"] == 0, -100),
    }
