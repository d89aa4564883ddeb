# ctest: seconds=40 label=multiprocess
"""Published models, eager and unchanged, on ranks and in one process."""

import torch
import torch.nn.functional as F

import smp
from harness import case, compare, ranks, run


def tokens(i, n=16, t=24, vocabulary=128, first=1):
    g = torch.Generator().manual_seed(100 + i)
    return torch.randint(first, vocabulary, (n, t), generator=g)


def masked(ids):
    mask = torch.ones_like(ids)
    mask[::2, -4:] = 0
    return mask


def language_model(make, mask=True, labels=True, **more):
    torch.manual_seed(0)
    net = make()

    def batch(i):
        ids = tokens(i)
        result = {"input_ids": ids, "labels": ids.clone()}
        if mask:
            result["attention_mask"] = masked(ids)
        return result

    compare(net, batch, lambda m, b: m(**b, **more).loss)


def gpt2_of(dropout=0.0, **more):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=64,
            n_embd=64,
            n_layer=4,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **more,
        )
    )


@case
def gpt2():
    language_model(gpt2_of, use_cache=False)


@case
def gpt2_with_dropout():
    compare(
        gpt2_of(0.1),
        lambda i: {"input_ids": tokens(i)},
        lambda m, b: m(**b, labels=b["input_ids"], use_cache=False).loss,
        each_step=True,
    )


@case
def gpt2_with_gradient_checkpointing():
    def make():
        net = gpt2_of(use_cache=False)
        net.gradient_checkpointing_enable({"use_reentrant": False})
        return net

    language_model(make)


def llama_config(**more):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **more,
    )


@case
def llama_with_tied_embeddings():
    from transformers import LlamaForCausalLM

    config = llama_config(tie_word_embeddings=True)
    language_model(lambda: LlamaForCausalLM(config), use_cache=False)


@case
def llama_with_a_cache():
    from transformers import LlamaForCausalLM

    language_model(lambda: LlamaForCausalLM(llama_config()), use_cache=True)


@case
def qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    language_model(lambda: Qwen2ForCausalLM(config), use_cache=False)


@case
def mistral():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=16,
    )
    language_model(lambda: MistralForCausalLM(config), use_cache=False)


@case
def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    language_model(lambda: GemmaForCausalLM(config), use_cache=False)


@case
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    language_model(
        lambda: MixtralForCausalLM(config), mask=False, use_cache=False
    )


@case
def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    language_model(lambda: BertForMaskedLM(config))


@case
def roberta():
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        pad_token_id=0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    language_model(lambda: RobertaForMaskedLM(config))


def sequence_to_sequence(net):
    def batch(i):
        return {"input_ids": tokens(i), "labels": tokens(i + 50, t=12)}

    compare(net, batch, lambda m, b: m(**b, use_cache=False).loss)


@case
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sequence_to_sequence(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=128,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=3,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )
    )


@case
def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sequence_to_sequence(
        BartForConditionalGeneration(
            BartConfig(
                vocab_size=128,
                d_model=64,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=128,
                decoder_ffn_dim=128,
                max_position_embeddings=64,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                encoder_layerdrop=0.0,
                decoder_layerdrop=0.0,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=2,
                forced_eos_token_id=None,
            )
        )
    )


@case
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    net = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=128,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            num_mel_bins=20,
            max_source_positions=32,
            max_target_positions=32,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )

    def batch(i):
        g = torch.Generator().manual_seed(i)
        features = torch.randn(8, 20, 64, generator=g)
        return {"input_features": features, "labels": tokens(i, n=8, t=12)}

    compare(net, batch, lambda m, b: m(**b, use_cache=False).loss)


def images(i, n=16, size=32):
    g = torch.Generator().manual_seed(100 + i)
    return {
        "x": torch.randn(n, 3, size, size, generator=g),
        "y": torch.randint(0, 10, (n,), generator=g),
    }


def image_classifier(net, of=lambda out: out, **more):
    compare(
        net, images, lambda m, b: F.cross_entropy(of(m(b["x"])), b["y"]), **more
    )


@case
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    net = ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
        )
    )
    image_classifier(net, lambda out: out.logits)


@case
def clip():
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    common = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
    )
    net = CLIPModel(
        CLIPConfig(
            text_config=dict(
                vocab_size=128,
                max_position_embeddings=32,
                eos_token_id=127,
                bos_token_id=1,
                pad_token_id=0,
                **common,
            ),
            vision_config=dict(image_size=32, patch_size=8, **common),
            projection_dim=32,
        )
    )

    def batch(i):
        g = torch.Generator().manual_seed(i)
        return {
            "input_ids": tokens(i, n=8, t=12),
            "pixel_values": torch.randn(8, 3, 32, 32, generator=g),
        }

    compare(net, batch, lambda m, b: m(**b, return_loss=True).loss)


@case
def llava():
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    image, patches = 127, 16  # the token that stands for each of its patches
    net = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=llama_config(),
            image_token_index=image,
            image_seq_length=patches,
        )
    )

    def batch(i):
        ids = tokens(i, t=28, vocabulary=image)
        ids[:, 4 : 4 + patches] = image
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": ids.masked_fill(ids == image, -100),
            "pixel_values": images(i)["x"],
        }

    compare(net, batch, lambda m, b: m(**b, use_cache=False).loss)


@case
def resnet18():
    import torchvision

    torch.manual_seed(0)
    image_classifier(
        torchvision.models.resnet18(num_classes=10),
        each_step=True,  # it doubles an error of 1e-7 with each layer
    )


@case
def timm_convnext():
    import timm

    torch.manual_seed(0)
    net = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.0)
    image_classifier(net, steps=2, within=1e-5)


@case
def timm_swin():
    import timm

    torch.manual_seed(0)
    net = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=24,
        depths=(2, 2),
        num_heads=(2, 4),
        drop_path_rate=0.0,
        num_classes=10,
    )
    image_classifier(net)


@case
def segmentation():
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    torch.manual_seed(0)
    net = lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=10
    )
    compare(
        net,
        lambda i: {**images(i), "y": images(i)["x"].argmax(1)},
        lambda m, b: F.cross_entropy(m(b["x"])["out"], b["y"]),
        steps=2,
        each_step=True,
    )


class Samples(list):
    """Of different sizes, so that no tensor can hold them."""

    def chunk(self, n):
        return [Samples(self[i::n]) for i in range(n)]

    def smp_slice(self, microbatches, index, axis):
        return list(self.chunk(microbatches)[index])


def pictures(i, n=8):
    """With up to four objects in each."""
    g = torch.Generator().manual_seed(i)

    def objects(n):
        corner = torch.randint(0, 24, (n, 2), generator=g)
        size = torch.randint(8, 32, (n, 2), generator=g)
        return {
            "boxes": torch.cat([corner, corner + size], 1).float(),
            "labels": torch.randint(1, 5, (n,), generator=g),
        }

    heights = [56 + 4 * (j % 3) for j in range(n)]
    return {
        "images": Samples(torch.rand(3, h, 64, generator=g) for h in heights),
        "targets": Samples(objects(1 + (i + j) % 4) for j in range(n)),
    }


@case
def detection():
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, trainable_layers=5
    )
    net = detection.FasterRCNN(
        backbone,
        box_head=detection.faster_rcnn.TwoMLPHead(256 * 7 * 7, 32),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, 5),
        min_size=64,
        max_size=64,
        rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=50,
    )
    compare(
        net,
        pictures,
        lambda m, b: sum(m(b["images"], b["targets"]).values()),
        steps=2,
        make=lambda ps: torch.optim.SGD(ps, lr=1e-3),
        anywhere=False,  # an ImageList cannot be sent
        each_step=True,  # which proposals it trains on
    )


@case
def generation_by_the_model_itself():
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    net = LlamaForCausalLM(llama_config()).eval()
    ids = tokens(0, n=2, t=8)
    how = dict(
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones_like(ids),
    )
    expected = net.generate(ids, **how)
    for i, layer in enumerate(net.model.layers):
        smp.set_partition(layer, i % 2)
    model = smp.DistributedModel(net)

    @smp.step(microbatches=1)
    def generate(ids):
        with torch.no_grad():
            return model.generate(ids, **how)

    assert torch.equal(generate(ids).concat(), expected)


if __name__ == "__main__":
    run(ranks(2))
