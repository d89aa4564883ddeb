# ctest: seconds=180 label=proof processors=2
"""Classifiers of torchvision and timm (architectures.py)."""

import torch
import torch.nn.functional as F

from architectures import add, classes, random
from harness import ranks, run


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


# fmt: off
classifiers(
    "torchvision", 64,
    "regnet_y_400mf shufflenet_v2_x0_5",
    efficientnet_b0=dict(dropout=0.0, stochastic_depth_prob=0.0),
    mnasnet0_5=dict(dropout=0.0), mobilenet_v2=dict(dropout=0.0,
        width_mult=0.35),
    mobilenet_v3_small=dict(dropout=0.0, width_mult=0.5),
    squeezenet1_1=dict(dropout=0.0),
)
classifiers(
    "timm", 64,
    """
    dla46x_c efficientvit_b0 lcnet_035 mobilevit_xxs mobilevitv2_050 regnetx_002
    test_byobnet test_convnext test_efficientnet test_efficientnet_evos
    test_mambaout test_nfnet test_resnet
    """,
    edgenext_xx_small=dict(drop_path_rate=0.0),
        efficientvit_m0=dict(img_size=64),
    fasternet_t0=dict(drop_path_rate=0.0), ghostnet_050=dict(drop_rate=0.0),
    pvt_v2_b0=dict(depths=(1, 1, 1, 1)), repghostnet_050=dict(drop_rate=0.0),
    sequencer2d_s=dict(img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32,
        32)),
    starnet_s050=dict(drop_rate=0.0),
    swinv2_tiny_window8_256=dict(img_size=64, window_size=4, embed_dim=24,
        depths=(2, 2), num_heads=(2, 4)),
    test_vit=dict(img_size=64), test_vit_relpos=dict(img_size=64),
    tinynet_e=dict(drop_rate=0.0),
    tnt_s_patch16_224=dict(img_size=64, embed_dim=48, depth=2, inner_dim=12,
        num_heads_outer=4),
    twins_svt_small=dict(img_size=64, embed_dims=(16, 32, 48, 64)),
    visformer_tiny=dict(img_size=64, embed_dim=32, depth=(1, 1, 1)),
    xcit_nano_12_p8_224=dict(img_size=64, embed_dim=32, depth=2),
    test_maxvit=dict(img_size=64, window_size=None),
        test_coatnet=dict(img_size=64),
    cait_xxs24_224=dict(img_size=64, embed_dim=48, depth=2),
    convit_tiny=dict(img_size=64, embed_dim=16, depth=2),
    beit_base_patch16_224=dict(img_size=64, embed_dim=64, depth=2, num_heads=4),
    eva02_tiny_patch14_224=dict(img_size=64, patch_size=16, embed_dim=48,
        depth=2, num_heads=3),
    naflexvit_base_patch16_gap=dict(embed_dim=64, depth=2, num_heads=4),
    deit_tiny_distilled_patch16_224=dict(img_size=64, embed_dim=48, depth=2,
        num_heads=3),
    davit_tiny=dict(depths=(1, 1, 1, 1), embed_dims=(16, 32, 48, 64),
        num_heads=(1, 2, 2, 2)),
)
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
