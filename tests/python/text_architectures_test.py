# ctest: seconds=110 label=proof processors=2
"""Models that fill in, translate and label text (architectures.py)."""

import torch

from architectures import architectures, classes, language, text, words
from harness import ranks, run


def entities(config, g):
    at, size = torch.randint(0, 32, (2, 8, 16, 2), generator=g)
    boxes = torch.cat([at, at + size], -1)
    return {**text(g), "bbox": boxes, "labels": classes(g, 16)}


def answers(config, g):
    first, last = torch.randint(0, 12, (2, 8), generator=g)
    return {**text(g), "start_positions": first, "end_positions": last}


# fmt: off
T5 = dict(decoder_start_token_id=0)
PERCEIVER = dict(num_latents=8, d_latents=32, num_self_attends_per_block=2,
    num_self_attention_heads=4, num_cross_attention_heads=4)

architectures(
    language,
    """
    AlbertForMaskedLM BertForMaskedLM ConvBertForMaskedLM
    Data2VecTextForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM
    DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM FNetForMaskedLM
    FlaubertWithLMHeadModel FunnelForMaskedLM IBertForMaskedLM
    LayoutLMForMaskedLM MPNetForMaskedLM MegatronBertForMaskedLM
    MobileBertForMaskedLM NezhaForMaskedLM NystromformerForMaskedLM
    RemBertForMaskedLM RoFormerForMaskedLM RobertaForMaskedLM
    RobertaPreLayerNormForMaskedLM SqueezeBertForMaskedLM TapasForMaskedLM
    XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM YosoForMaskedLM
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
    BlenderbotSmallForConditionalGeneration
    GPTSanJapaneseForConditionalGeneration M2M100ForConditionalGeneration
    MBartForConditionalGeneration MT5ForConditionalGeneration MarianMTModel
    MvpForConditionalGeneration NllbMoeForConditionalGeneration
    PLBartForConditionalGeneration PegasusForConditionalGeneration
    ProphetNetForConditionalGeneration SeamlessM4TForTextToText
    SeamlessM4Tv2ForTextToText UMT5ForConditionalGeneration
    XLMProphetNetForConditionalGeneration
    """,
    BigBirdPegasusForConditionalGeneration=dict(attention_type="original_full"),
    FSMTForConditionalGeneration=dict(src_vocab_size=128, tgt_vocab_size=128),
    LEDForConditionalGeneration=dict(attention_window=[4, 4]),
    LongT5ForConditionalGeneration=T5,
    PegasusXForConditionalGeneration=dict(block_size=8),
    SwitchTransformersForConditionalGeneration=T5,
    T5ForConditionalGeneration=T5,
)
architectures(
    entities,
    """
    BrosForTokenClassification CanineForTokenClassification
    ErnieMForTokenClassification MarkupLMForTokenClassification
    MT5ForTokenClassification
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
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
