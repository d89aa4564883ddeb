# ctest: seconds=150 label=proof processors=2
"""Models of images and videos (architectures.py)."""

import torch

from architectures import architectures, classes, random
from harness import ranks, run


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


# fmt: off
EFFICIENTNET = dict(width_coefficient=0.25, depth_coefficient=0.3,
    batch_norm_momentum=0.1)
HIERA = dict(image_size=[64, 64], embed_dim=16, num_heads=[1, 1, 2, 2],
    masked_unit_size=[8, 8])
MOBILEVIT = dict(patch_size=2, hidden_sizes=[32, 32, 48], neck_hidden_sizes=[16,
    16, 16, 32, 32, 48, 64])
SWIN = dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
    num_heads=[2, 4], window_size=4)
RESNET = dict(model_type="resnet", embedding_size=16, hidden_sizes=[16, 16, 32,
    32], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3",
    "stage4"])
DETR = dict(use_timm_backbone=False, backbone=None,
    use_pretrained_backbone=False, backbone_config=RESNET, num_queries=8)
DPT = dict(num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=16)

architectures(
    pictures,
    """
    Data2VecVisionForImageClassification DeiTForImageClassification
    DeiTForImageClassificationWithTeacher Dinov2ForImageClassification
    PoolFormerForImageClassification PvtForImageClassification
    PvtV2ForImageClassification RegNetForImageClassification
    ResNetForImageClassification SegformerForImageClassification
    SwiftFormerForImageClassification VanForImageClassification
    ViTForImageClassification ViTMSNForImageClassification VitDetModel
    YolosModel BeitForImageClassification
    """,
    BitForImageClassification=dict(num_groups=4, embedding_size=16),
    ConvNextForImageClassification=dict(patch_size=4),
    ConvNextV2ForImageClassification=dict(patch_size=4),
    CvtForImageClassification=dict(depth=[1, 2, 3], embed_dim=[16, 32, 64],
        num_heads=[1, 2, 4], drop_path_rate=[0.0, 0.0, 0.0]),
    EfficientFormerForImageClassification=dict(image_size=64, hidden_sizes=[16,
        16, 32, 64], depths=[1, 1, 1, 2], num_hidden_layers=2, resolution=2,
        dim=64),
    EfficientNetForImageClassification=dict(hidden_dim=320, **EFFICIENTNET),
    FocalNetForImageClassification=dict(embed_dim=16),
    HieraForImageClassification=HIERA,
    LevitForImageClassification=dict(image_size=64, patch_size=16,
        hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4]),
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
    ViTMAEForPreTraining=dict(patch_size=4, mask_ratio=0.5,
        decoder_hidden_size=32, decoder_num_hidden_layers=1,
        decoder_intermediate_size=64, decoder_num_attention_heads=4),
)
architectures(
    lambda c, g: {"pixel_values": random(g, 3, 32, 32),
        "labels": classes(g, 32, 32)},
    "SegformerForSemanticSegmentation",
    BeitForSemanticSegmentation=dict(num_hidden_layers=4, out_indices=[1, 2, 3,
        4], pool_scales=[1, 2]),
    DPTForSemanticSegmentation=dict(semantic_classifier_dropout=0.0, **DPT),
    Data2VecVisionForSemanticSegmentation=dict(num_hidden_layers=4,
        out_indices=[1, 2, 3, 4], pool_scales=[1, 2]),
    MobileNetV2ForSemanticSegmentation=dict(depth_multiplier=0.25),
    MobileViTForSemanticSegmentation=dict(aspp_out_channels=32, **MOBILEVIT),
    UperNetForSemanticSegmentation=dict(backbone_config=RESNET, hidden_size=32,
        auxiliary_channels=16, auxiliary_in_channels=32, pool_scales=[1, 2]),
)
architectures(
    lambda c, g: {"pixel_values": random(g, 3, 64, 64)},
    "YolosForObjectDetection",
    ConditionalDetrForObjectDetection=DETR,
    DeformableDetrForObjectDetection=DETR,
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
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
