"""What the configs of MLA models say of their attention."""

YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": YARN,
}
V2 = V2_LITE | {"hidden_size": 5120, "num_attention_heads": 128, "q_lora_rank": 1536}
V3 = V2 | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32},
}
GLM_4_7_FLASH = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_attention_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_scaling": None,
}
MINICPM3 = {
    "model_type": "minicpm3",
    "hidden_size": 2560,
    "num_attention_heads": 40,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
}
