# ctest: seconds=80 label=proof processors=2
"""Models that continue a text (architectures.py)."""

from architectures import architectures, language
from harness import ranks, run

# fmt: off
REFORMER = dict(attn_layers=["local", "lsh"], axial_pos_shape=[4, 4],
    axial_pos_embds_dim=[32, 32], local_attn_chunk_length=4,
    lsh_attn_chunk_length=4, num_buckets=4, hash_seed=1, attention_head_size=16)
ZAMBA = dict(num_hidden_layers=6, attn_layer_period=3, attn_layer_offset=2,
    use_mamba_kernels=False, attention_hidden_size=128, attention_head_dim=32,
    num_key_value_heads=4)

architectures(
    language,
    """
    BartForCausalLM BioGptForCausalLM BloomForCausalLM CohereForCausalLM
    CpmAntForCausalLM DbrxForCausalLM FalconForCausalLM FalconMambaForCausalLM
    GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM
    GPTNeoXJapaneseForCausalLM Gemma2ForCausalLM GemmaForCausalLM GlmForCausalLM
    GraniteForCausalLM GraniteMoeForCausalLM JetMoeForCausalLM LlamaForCausalLM
    MambaForCausalLM MistralForCausalLM MixtralForCausalLM MptForCausalLM
    OPTForCausalLM OlmoForCausalLM OlmoeForCausalLM OpenAIGPTLMHeadModel
    OpenLlamaForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM
    ProphetNetForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM RwkvForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM XGLMForCausalLM
    XLMWithLMHeadModel XLNetLMHeadModel
    """,
    BertLMHeadModel=dict(is_decoder=True),
        BertGenerationDecoder=dict(is_decoder=True),
    BigBirdForCausalLM=dict(is_decoder=True, attention_type="original_full"),
    CTRLLMHeadModel=dict(dff=128), CamembertForCausalLM=dict(is_decoder=True),
    CodeGenForCausalLM=dict(rotary_dim=8),
        ElectraForCausalLM=dict(is_decoder=True),
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
# fmt: on

if __name__ == "__main__":
    run(ranks(2), ranks(2, places=3))
