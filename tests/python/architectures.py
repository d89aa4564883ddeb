"""Published architectures, each at a tiny configuration with random weights, and
otherwise unchanged, on two ranks and in one process. To be run by hand, in some
ten minutes; cases that are named, in seconds.

A case is called as its class in transformers, or as its model in torchvision or
timm. Nothing is drawn at random in a step: dropout and masks are off.
"""

import inspect

import torch
import torch.nn.functional as F

from harness import case, compare, expect, ranks, run

# Rows whose last digit grows too fast to compare anything but single steps.
CHAOTIC = set("""
    CpmAntForCausalLM BitForImageClassification DeiTForImageClassification
    DeiTForImageClassificationWithTeacher EfficientNetForImageClassification
    LevitForImageClassification MobileNetV1ForImageClassification
    MobileNetV2ForImageClassification MobileViTForImageClassification
    RegNetForImageClassification ResNetForImageClassification
    SwiftFormerForImageClassification VanForImageClassification YolosModel
    DeiTForMaskedImageModeling Swinv2ForMaskedImageModeling DPTForSemanticSegmentation
    MobileNetV2ForSemanticSegmentation MobileViTForSemanticSegmentation
    UperNetForSemanticSegmentation DeformableDetrForObjectDetection
    DetaForObjectDetection DetrForObjectDetection YolosForObjectDetection
    Data2VecAudioForCTC HubertForCTC UniSpeechSatForCTC Wav2Vec2ConformerForCTC
    UniSpeechSatForXVector Wav2Vec2ForXVector WavLMForXVector Wav2Vec2BertForCTC
    ASTForAudioClassification AlignModel BlipModel Blip2ForConditionalGeneration
    FlavaModel GroupViTModel ViltForMaskedLM InformerForPrediction
    torchvision_efficientnet_b0 torchvision_mnasnet0_5 torchvision_mobilenet_v2
    torchvision_regnet_y_400mf torchvision_shufflenet_v2_x0_5 timm_dla46x_c
    timm_efficientvit_b0 timm_efficientvit_m0 timm_ghostnet_050 timm_lcnet_035
    timm_repghostnet_050 timm_starnet_s050 timm_swinv2_tiny_window8_256
    timm_test_vit_relpos timm_tinynet_e
    """.split())

# Rows that are refused, and a part of what the error says.
REFUSED = {"ReformerModelWithLMHead": "'feed_forward_seed' of"}

# -- tiny configurations -----------------------------------------------------------
# By the names that configurations have for them. Of a list, as many items.
SIZES = {
    64: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size d_embed"
    " projection_dim entity_emb_size word_embed_proj_dim lru_width"
    " attention_hidden_size",
    128: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff d_inner"
    " dim_feedforward ffn_hidden_size ffn_dim vocab_size feed_forward_size dim_ff"
    " moe_intermediate_size shared_expert_intermediate_size",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length"
    " max_source_positions max_target_positions",
    32: "image_size",
    16: "d_kv head_dim kv_channels d_head dim_head state_size num_mel_bins",
    8: "patch_size",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts"
    " encoder_attention_heads decoder_attention_heads num_encoder_attention_heads"
    " num_decoder_attention_heads",
    2: "num_key_value_heads num_hidden_layers n_layer n_layers num_layers"
    " encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
    " speech_encoder_layers num_experts_per_tok",
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
    """A case that trains what ``make`` returns, on what ``batch`` makes of it and
    of a generator."""

    def one():
        torch.manual_seed(0)
        net = make()

        def batch_of(i):
            return batch(net, torch.Generator().manual_seed(100 + i))

        def train():
            compare(net, batch_of, loss_of, steps=2, each_step=name in CHAOTIC)

        if name in REFUSED:
            expect(RuntimeError, REFUSED[name], train)
        else:
            train()

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
        how = known(of_library().forward, {"use_cache": False, "return_loss": True})
        return loss_of_output(model(**b, **how))

    add(name, make, batch_of, loss_of)


def classifiers(library, size, names, **rows):
    for name, more in {**{n: {} for n in names.split()}, **rows}.items():
        add_classifier(library, name, size, more)


def add_classifier(library, name, size, more):
    def make():
        if library == "timm":
            import timm

            return timm.create_model(name, num_classes=10, **more)
        import torchvision

        return torchvision.models.get_model(name, num_classes=10, **more)

    def batch(net, g):
        return {"x": random(g, 3, size, size), "y": classes(g, n=10)}

    def loss_of(model, b):
        out = model(b["x"])
        parts = [out] if torch.is_tensor(out) else list(out)
        return sum(F.cross_entropy(x, b["y"]) for x in parts)

    add(f"{library}_{name}", make, batch, loss_of)


# -- batches -----------------------------------------------------------------------
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


def entities(config, g):
    at, size = torch.randint(0, 32, (2, 8, 16, 2), generator=g)
    boxes = torch.cat([at, at + size], -1)
    return {**text(g), "bbox": boxes, "labels": classes(g, 16)}


def answers(config, g):
    first, last = torch.randint(0, 12, (2, 8), generator=g)
    return {**text(g), "start_positions": first, "end_positions": last}


def pictures(config, g):
    t = 32 if getattr(config, "image_size", 0) == 32 else 64
    return {"pixel_values": random(g, 3, t, t), "labels": classes(g)}


def patches_masked(config, g):
    images = pictures(config, g)["pixel_values"]
    mask = torch.arange(64).expand(8, 64) % 2 == 0
    noise = torch.rand(8, 64, generator=g)
    return {"pixel_values": images, "bool_masked_pos": mask, "noise": noise}


def videos(config, g):
    mask = torch.arange(32).expand(8, 32) % 2 == 0
    clips = random(g, 4, 3, 32, 32)
    return {
        "pixel_values": clips,
        "labels": classes(g),
        "bool_masked_pos": mask,
    }


def captions(config, g):
    b = text(g)
    return {**b, "pixel_values": random(g, 3, 32, 32), "labels": b["input_ids"]}


def images_in_text(config, g):
    """With a token for each of an image's patches."""
    image = 127
    ids = torch.cat([words(g, 2), torch.full((8, 16), image), words(g, 6)], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (torch.arange(24) > 20).long().expand(8, 24),
        "pixel_values": random(g, 3, 32, 32),
        "labels": ids.masked_fill(ids == image, -100),
    }


def series(config, g):
    past, future = config.context_length + 7, config.prediction_length
    return {
        "past_values": random(g, past),
        "past_time_features": random(g, past, 1),
        "past_observed_mask": torch.ones(8, past),
        "future_values": random(g, future),
        "future_time_features": random(g, future, 1),
    }


def channels(config, g):
    past, future = random(g, 32, 2), random(g, config.prediction_length, 2)
    return {
        "past_values": past,
        "future_values": future,
        "target_values": classes(g),
    }


# -- rows --------------------------------------------------------------------------
# fmt: off
# What several rows share.
T5 = dict(decoder_start_token_id=0)
REFORMER = dict(attn_layers=["local", "lsh"], axial_pos_shape=[4, 4],
    axial_pos_embds_dim=[32, 32], local_attn_chunk_length=4, lsh_attn_chunk_length=4,
    num_buckets=4, hash_seed=1, attention_head_size=16)
PERCEIVER = dict(num_latents=8, d_latents=32, num_self_attends_per_block=2,
    num_self_attention_heads=4, num_cross_attention_heads=4)
EFFICIENTNET = dict(width_coefficient=0.25, depth_coefficient=0.3,
    batch_norm_momentum=0.1)
WAVES = dict(conv_dim=[16] * 3, conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3],
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, ctc_zero_infinity=True)
XVECTOR = dict(tdnn_dim=[32] * 5, xvector_output_dim=32, **WAVES)
HIERA = dict(image_size=[64, 64], embed_dim=16, num_heads=[1, 1, 2, 2],
    masked_unit_size=[8, 8])
MOBILEVIT = dict(patch_size=2, hidden_sizes=[32, 32, 48], neck_hidden_sizes=[16, 16, 16,
    32, 32, 48, 64])
SWIN = dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
    window_size=4)
RESNET = dict(model_type="resnet", embedding_size=16, hidden_sizes=[16, 16, 32, 32],
    depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"])
DETR = dict(use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
    backbone_config=RESNET, num_queries=8)
DPT = dict(num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16)
ZAMBA = dict(num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=2,
    use_mamba_kernels=False, attention_hidden_size=128, attention_head_dim=32,
    num_key_value_heads=4)
LLAVA = dict(image_token_index=127, image_seq_length=16)
CHANNELS = dict(num_input_channels=2, context_length=32)
FORECAST = dict(context_length=16, prediction_length=8, num_time_features=1)

architectures(
    language,
    """
    BartForCausalLM BioGptForCausalLM BloomForCausalLM CohereForCausalLM
    CpmAntForCausalLM DbrxForCausalLM FalconForCausalLM FalconMambaForCausalLM
    GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM
    Gemma2ForCausalLM GemmaForCausalLM GlmForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM JetMoeForCausalLM LlamaForCausalLM MambaForCausalLM
    MistralForCausalLM MixtralForCausalLM MptForCausalLM OPTForCausalLM OlmoForCausalLM
    OlmoeForCausalLM OpenAIGPTLMHeadModel OpenLlamaForCausalLM PersimmonForCausalLM
    Phi3ForCausalLM PhiForCausalLM ProphetNetForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM RwkvForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    TrOCRForCausalLM XGLMForCausalLM XLMWithLMHeadModel XLNetLMHeadModel
    """,
    BertLMHeadModel=dict(is_decoder=True), BertGenerationDecoder=dict(is_decoder=True),
    BigBirdForCausalLM=dict(is_decoder=True, attention_type="original_full"),
    CTRLLMHeadModel=dict(dff=128), CamembertForCausalLM=dict(is_decoder=True),
    CodeGenForCausalLM=dict(rotary_dim=8), ElectraForCausalLM=dict(is_decoder=True),
    GPTJForCausalLM=dict(rotary_dim=8),
    GPTNeoForCausalLM=dict(attention_types=[[["global", "local"], 1]]),
    JambaForCausalLM=dict(use_mamba_kernels=False),
    Mamba2ForCausalLM=dict(num_heads=8, n_groups=2, chunk_size=8),
    MegaForCausalLM=dict(is_decoder=True),
    NemotronForCausalLM=dict(head_dim=16, num_key_value_heads=2),
    PhimoeForCausalLM=dict(router_jitter_noise=0.0, input_jitter_noise=0.0),
    ReformerModelWithLMHead=dict(is_decoder=True, **REFORMER),
    XmodForCausalLM=dict(is_decoder=True, default_language="en_XX"),
    ZambaForCausalLM=ZAMBA,
)
architectures(
    language,
    """
    AlbertForMaskedLM BertForMaskedLM ConvBertForMaskedLM Data2VecTextForMaskedLM
    DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM
    ErnieForMaskedLM FNetForMaskedLM FlaubertWithLMHeadModel FunnelForMaskedLM
    IBertForMaskedLM LayoutLMForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM
    MobileBertForMaskedLM NezhaForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM
    RoFormerForMaskedLM RobertaForMaskedLM RobertaPreLayerNormForMaskedLM
    SqueezeBertForMaskedLM TapasForMaskedLM XLMRobertaForMaskedLM
    XLMRobertaXLForMaskedLM YosoForMaskedLM
    """,
    BigBirdForMaskedLM=dict(attention_type="original_full"),
    EsmForMaskedLM=dict(vocab_size=128, pad_token_id=1, mask_token_id=3),
    LongformerForMaskedLM=dict(attention_window=[4, 4]),
    LukeForMaskedLM=dict(entity_vocab_size=64),
    PerceiverForMaskedLM=dict(max_position_embeddings=16, **PERCEIVER),
        RoCBertForMaskedLM=dict(shape_vocab_size=64, pronunciation_vocab_size=64),
)
architectures(
    lambda c, g: {**text(g), "labels": words(g)},
    """
    BartForConditionalGeneration BlenderbotForConditionalGeneration
    BlenderbotSmallForConditionalGeneration GPTSanJapaneseForConditionalGeneration
    M2M100ForConditionalGeneration MBartForConditionalGeneration
    MT5ForConditionalGeneration MarianMTModel MvpForConditionalGeneration
    NllbMoeForConditionalGeneration PLBartForConditionalGeneration
    PegasusForConditionalGeneration ProphetNetForConditionalGeneration
    SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText UMT5ForConditionalGeneration
    XLMProphetNetForConditionalGeneration
    """,
    BigBirdPegasusForConditionalGeneration=dict(attention_type="original_full"),
    FSMTForConditionalGeneration=dict(src_vocab_size=128, tgt_vocab_size=128),
    LEDForConditionalGeneration=dict(attention_window=[4, 4]),
    LongT5ForConditionalGeneration=T5,
    PegasusXForConditionalGeneration=dict(block_size=8),
    SwitchTransformersForConditionalGeneration=T5, T5ForConditionalGeneration=T5,
)
architectures(
    entities,
    """
    BrosForTokenClassification CanineForTokenClassification ErnieMForTokenClassification
    MarkupLMForTokenClassification MT5ForTokenClassification
    """,
    LayoutLMv3ForTokenClassification=dict(visual_embed=False, coordinate_size=8,
        shape_size=16),
    LiltForTokenClassification=dict(hidden_size=96),
)
architectures(
    answers,
    """
    SplinterForQuestionAnswering BartForQuestionAnswering
    XLNetForQuestionAnsweringSimple
    """,
)
architectures(
    pictures,
    """
    Data2VecVisionForImageClassification
    DeiTForImageClassification DeiTForImageClassificationWithTeacher
    Dinov2ForImageClassification PoolFormerForImageClassification
    PvtForImageClassification PvtV2ForImageClassification RegNetForImageClassification
    ResNetForImageClassification SegformerForImageClassification
    SwiftFormerForImageClassification VanForImageClassification
    ViTForImageClassification ViTMSNForImageClassification VitDetModel YolosModel
    BeitForImageClassification
    """,
    BitForImageClassification=dict(num_groups=4, embedding_size=16),
    ConvNextForImageClassification=dict(patch_size=4),
    ConvNextV2ForImageClassification=dict(patch_size=4),
    CvtForImageClassification=dict(depth=[1, 2, 3], embed_dim=[16, 32, 64],
        num_heads=[1, 2, 4], drop_path_rate=[0.0, 0.0, 0.0]),
    EfficientFormerForImageClassification=dict(image_size=64, hidden_sizes=[16, 16, 32,
        64], depths=[1, 1, 1, 2], num_hidden_layers=2, resolution=2, dim=64),
    EfficientNetForImageClassification=dict(hidden_dim=320, **EFFICIENTNET),
    FocalNetForImageClassification=dict(embed_dim=16),
    HieraForImageClassification=HIERA,
    LevitForImageClassification=dict(image_size=64, patch_size=16, hidden_sizes=[32, 48,
        64], num_attention_heads=[2, 3, 4]),
    MobileNetV1ForImageClassification=dict(depth_multiplier=0.25),
    MobileNetV2ForImageClassification=dict(depth_multiplier=0.25),
    MobileViTForImageClassification=MOBILEVIT, SwinForImageClassification=SWIN,
    Swinv2ForImageClassification=SWIN, DonutSwinModel=SWIN,
)
architectures(
    patches_masked,
    "",
    DeiTForMaskedImageModeling=dict(patch_size=4, encoder_stride=4),
    SwinForMaskedImageModeling=dict(encoder_stride=8, **SWIN),
    Swinv2ForMaskedImageModeling=dict(encoder_stride=8, **SWIN),
    ViTForMaskedImageModeling=dict(patch_size=4, encoder_stride=4),
    ViTMAEForPreTraining=dict(patch_size=4, mask_ratio=0.5, decoder_hidden_size=32,
        decoder_num_hidden_layers=1, decoder_intermediate_size=64,
        decoder_num_attention_heads=4),
)
architectures(
    lambda c, g: {"pixel_values": random(g, 3, 32, 32),
        "labels": classes(g, 32, 32)},
    "SegformerForSemanticSegmentation",
    BeitForSemanticSegmentation=dict(num_hidden_layers=4, out_indices=[1, 2, 3, 4],
        pool_scales=[1, 2]),
    DPTForSemanticSegmentation=dict(semantic_classifier_dropout=0.0, **DPT),
    Data2VecVisionForSemanticSegmentation=dict(num_hidden_layers=4, out_indices=[1, 2,
        3, 4], pool_scales=[1, 2]),
    MobileNetV2ForSemanticSegmentation=dict(depth_multiplier=0.25),
    MobileViTForSemanticSegmentation=dict(aspp_out_channels=32, **MOBILEVIT),
    UperNetForSemanticSegmentation=dict(backbone_config=RESNET, hidden_size=32,
        auxiliary_channels=16, auxiliary_in_channels=32, pool_scales=[1, 2]),
)
architectures(
    lambda c, g: {"pixel_values": random(g, 3, 64, 64)},
    "YolosForObjectDetection",
    ConditionalDetrForObjectDetection=DETR, DeformableDetrForObjectDetection=DETR,
    DPTForDepthEstimation=DPT,
    DetaForObjectDetection=dict(two_stage=False, with_box_refine=True,
        assign_first_stage=False, num_queries=8, backbone_config=RESNET),
    DetrForObjectDetection=DETR,
    GLPNForDepthEstimation=dict(sr_ratios=[2, 2, 1, 1], decoder_hidden_size=16),
    TableTransformerForObjectDetection=DETR,
)
architectures(
    videos,
    "",
    TimesformerForVideoClassification=dict(num_frames=4),
    VideoMAEForPreTraining=dict(num_frames=4, decoder_hidden_size=32,
        decoder_num_hidden_layers=1, decoder_intermediate_size=64,
        decoder_num_attention_heads=4),
    VideoMAEForVideoClassification=dict(num_frames=4),
    VivitForVideoClassification=dict(num_frames=4, tubelet_size=[2, 8, 8]),
)
architectures(
    lambda c, g: {"input_values": random(g, 640), "labels": words(g, 4)},
    "",
    Data2VecAudioForCTC=dict(conv_pos_kernel_size=7, **WAVES), HubertForCTC=WAVES,
    SEWDForCTC=WAVES, SEWForCTC=WAVES, UniSpeechForCTC=WAVES, UniSpeechSatForCTC=WAVES,
    Wav2Vec2ConformerForCTC=dict(vocab_size=128, **WAVES), Wav2Vec2ForCTC=WAVES,
    WavLMForCTC=WAVES, SpeechT5ForSpeechToText=WAVES,
)
architectures(
    lambda c, g: {"input_values": random(g, 640), "labels": classes(g)},
    "",
    HubertForSequenceClassification=WAVES, UniSpeechSatForXVector=XVECTOR,
    Wav2Vec2ForSequenceClassification=WAVES, Wav2Vec2ForXVector=XVECTOR,
    WavLMForXVector=XVECTOR,
)
architectures(
    lambda c, g: {"input_features": random(g, 64, 16), "labels": words(g, 4)},
    "",
    MCTCTForCTC=dict(attention_head_dim=16, input_feat_per_channel=16, conv_glu_dim=1),
    Speech2TextForConditionalGeneration=dict(input_feat_per_channel=16,
        conv_channels=32),
    Wav2Vec2BertForCTC=dict(vocab_size=128, feature_projection_input_dim=16),
)
architectures(
    lambda c, g: {"input_features": random(g, 16, 64), "labels": classes(g)},
    "",
    WhisperForAudioClassification=dict(max_source_positions=32),
)
architectures(
    lambda c, g: {"input_values": random(g, 64, 16), "labels": classes(g)},
    "",
    ASTForAudioClassification=dict(max_length=64, num_mel_bins=16, patch_size=8,
        frequency_stride=8, time_stride=8),
)
architectures(
    lambda c, g: {"input_features": random(g, 16, 64), "labels": words(g, 4)},
    "",
    WhisperForConditionalGeneration=dict(max_source_positions=32),
)
architectures(
    captions,
    """
    AltCLIPModel BlipModel BlipForConditionalGeneration BlipForQuestionAnswering
    Blip2ForConditionalGeneration BridgeTowerModel CLIPModel CLIPSegModel
    ChineseCLIPModel FlavaModel GitForCausalLM GroupViTModel OwlViTModel Owlv2Model
    SiglipModel ViltForMaskedLM
    """,
    AlignModel=dict(projection_dim=80, vision_config=dict(hidden_dim=64,
        **EFFICIENTNET)),
)
architectures(
    images_in_text,
    "",
    LlavaForConditionalGeneration=LLAVA,
    VipLlavaForConditionalGeneration=dict(vision_feature_layers=[-2, -1], **LLAVA),
    PaliGemmaForConditionalGeneration=dict(image_token_index=127),
)
architectures(
    series,
    "",
    AutoformerForPrediction=FORECAST, InformerForPrediction=FORECAST,
    TimeSeriesTransformerForPrediction=FORECAST,
)
architectures(
    channels,
    "",
    PatchTSMixerForPrediction=CHANNELS,
    PatchTSMixerForTimeSeriesClassification=CHANNELS,
    PatchTSTForClassification=dict(num_targets=2, **CHANNELS),
    PatchTSTForPrediction=CHANNELS,
)
classifiers(
    "torchvision", 64,
    "regnet_y_400mf shufflenet_v2_x0_5",
    efficientnet_b0=dict(dropout=0.0, stochastic_depth_prob=0.0),
    mnasnet0_5=dict(dropout=0.0), mobilenet_v2=dict(dropout=0.0, width_mult=0.35),
    mobilenet_v3_small=dict(dropout=0.0, width_mult=0.5),
    squeezenet1_1=dict(dropout=0.0),
)
classifiers(
    "timm", 64,
    """
    dla46x_c efficientvit_b0 lcnet_035 mobilevit_xxs mobilevitv2_050 regnetx_002
    test_byobnet test_convnext test_efficientnet test_efficientnet_evos test_mambaout
    test_nfnet test_resnet
    """,
    edgenext_xx_small=dict(drop_path_rate=0.0), efficientvit_m0=dict(img_size=64),
    fasternet_t0=dict(drop_path_rate=0.0), ghostnet_050=dict(drop_rate=0.0),
    pvt_v2_b0=dict(depths=(1, 1, 1, 1)), repghostnet_050=dict(drop_rate=0.0),
    sequencer2d_s=dict(img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32)),
    starnet_s050=dict(drop_rate=0.0),
    swinv2_tiny_window8_256=dict(img_size=64, window_size=4, embed_dim=24, depths=(2,
        2), num_heads=(2, 4)),
    test_vit=dict(img_size=64), test_vit_relpos=dict(img_size=64),
    tinynet_e=dict(drop_rate=0.0),
    tnt_s_patch16_224=dict(img_size=64, embed_dim=48, depth=2, inner_dim=12,
        num_heads_outer=4),
    twins_svt_small=dict(img_size=64, embed_dims=(16, 32, 48, 64)),
    visformer_tiny=dict(img_size=64, embed_dim=32, depth=(1, 1, 1)),
    xcit_nano_12_p8_224=dict(img_size=64, embed_dim=32, depth=2),
    test_maxvit=dict(img_size=64, window_size=None), test_coatnet=dict(img_size=64),
    cait_xxs24_224=dict(img_size=64, embed_dim=48, depth=2),
    convit_tiny=dict(img_size=64, embed_dim=16, depth=2),
    beit_base_patch16_224=dict(img_size=64, embed_dim=64, depth=2, num_heads=4),
    eva02_tiny_patch14_224=dict(img_size=64, patch_size=16, embed_dim=48, depth=2,
        num_heads=3),
    naflexvit_base_patch16_gap=dict(embed_dim=64, depth=2, num_heads=4),
    deit_tiny_distilled_patch16_224=dict(img_size=64, embed_dim=48, depth=2,
        num_heads=3),
    davit_tiny=dict(depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64), num_heads=(1, 2,
        2, 2)),
)
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
