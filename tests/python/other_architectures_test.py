# ctest: seconds=110 label=proof processors=2
"""Models of sound, of images with text, and of series (architectures.py)."""

import torch

from architectures import (
    architectures,
    classes,
    random,
    text,
    words,
)
from harness import ranks, run


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


# fmt: off
WAVES = dict(conv_dim=[16] * 3, conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3],
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    ctc_zero_infinity=True)
XVECTOR = dict(tdnn_dim=[32] * 5, xvector_output_dim=32, **WAVES)
LLAVA = dict(image_token_index=127, image_seq_length=16)
CHANNELS = dict(num_input_channels=2, context_length=32)
FORECAST = dict(context_length=16, prediction_length=8, num_time_features=1)

architectures(
    lambda c, g: {"input_values": random(g, 640), "labels": words(g, 4)},
    "",
    Data2VecAudioForCTC=dict(conv_pos_kernel_size=7, **WAVES),
        HubertForCTC=WAVES,
    SEWDForCTC=WAVES, SEWForCTC=WAVES, UniSpeechForCTC=WAVES,
    UniSpeechSatForCTC=WAVES,
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
    MCTCTForCTC=dict(attention_head_dim=16, input_feat_per_channel=16,
        conv_glu_dim=1),
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
    ChineseCLIPModel FlavaModel GitForCausalLM GroupViTModel OwlViTModel
    Owlv2Model SiglipModel ViltForMaskedLM
    """,
    AlignModel=dict(projection_dim=80, vision_config=dict(hidden_dim=64,
        width_coefficient=0.25, depth_coefficient=0.3,
        batch_norm_momentum=0.1)),
)
architectures(
    images_in_text,
    "",
    LlavaForConditionalGeneration=LLAVA,
    VipLlavaForConditionalGeneration=dict(vision_feature_layers=[-2, -1],
        **LLAVA),
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
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
