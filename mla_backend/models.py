"""Families of models with latent attention (MLA): their dimensions, and how far each engine serves them.

`mla-backend doctor MODEL`, the tests of whole models and docs/models.md come from this table. A model that is
not in it may be served as well: what counts are its dimensions and its layers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_backend.geometry import MLAGeometry, language_config


class State(enum.Enum):
    """How far an engine serves a family on one kind of device."""

    TESTED = "tested"
    """A small checkpoint with the family's layers generates the right tokens."""
    UNTESTED = "untested"
    """Nothing known stands against it."""
    REFUSED = "refused"
    """This backend ends the start with an error."""
    ABSENT = "no"
    """The engine cannot serve the model, or serves it without latent attention."""

    @property
    def is_served(self) -> bool:
        """Whether the family may be served."""
        return self in (State.TESTED, State.UNTESTED)


@dataclass(frozen=True)
class Support:
    """How far an engine serves a family.

    Attributes:
        cpu: state on the CPU.
        gpu: state on GPUs.
        reason: why the family is not served where it is not, as it follows "because".
        options: what to add to the engine's command line where it is served.
    """

    cpu: State
    gpu: State
    reason: str = ""
    options: str = ""

    def on(self, device_type: str) -> State:
        """The state on "cpu" or on "cuda"."""
        return self.cpu if device_type == "cpu" else self.gpu

    def __str__(self) -> str:
        if self.cpu is not self.gpu:
            states = f"{self.cpu.value} on the CPU, {self.gpu.value} on GPUs"
        else:
            states = self.cpu.value + " on the CPU and on GPUs" * self.cpu.is_served
        return states + f": {self.reason}" * bool(self.reason) + f"; with {self.options}" * bool(self.options)


@dataclass(frozen=True)
class ModelFamily:
    """Models whose attention layers have the same code, heads and dimensions.

    Attributes:
        name: the best known model.
        config: what the config.json of ``name`` says of its attention; of a multimodal model, the part about
            the language model.
        vllm, sglang: how far the engines serve it.
        also: other models of the family, some of which have other numbers of heads or layers.
        special: what sets its attention apart.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    vllm: Support
    sglang: Support
    also: str = ""
    special: str = ""

    @property
    def geometry(self) -> MLAGeometry:
        """Of an attention layer of ``name``."""
        return MLAGeometry.from_hf_config(self.config)

    def resemblance(self, config: Mapping[str, Any]) -> int:
        """How much a model is like those of the family: 0, if its code is another's, to 3.

        Args:
            config: the dict of the model's config.json.

        Raises:
            InvalidInputError: the config does not describe an MLA model.
        """
        language = language_config(config)
        has_type = language.get("model_type") == self.config["model_type"]
        has_class = language.get("architectures") == self.config["architectures"]
        if not has_type and not has_class:
            return 0
        return has_type + has_class + (_dimensions(language) == _dimensions(self.config))


def _dimensions(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    shape = MLAGeometry.from_hf_config(config)
    heads = (shape.num_heads, shape.qk_nope_head_dim, shape.v_head_dim)
    return (*heads, shape.kv_lora_rank, shape.hidden_size, shape.q_lora_rank)


def family_of(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family that a model belongs to; None if its code is not in the table.

    Args:
        config: the dict of the model's config.json.

    Raises:
        InvalidInputError: the config does not describe an MLA model.
    """
    best = max(FAMILIES, key=lambda family: family.resemblance(config))
    return best if best.resemblance(config) else None


def _yarn(factor: int, mscale: float = 1.0) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }


def _config(architecture: str, model_type: str, *, hidden: int, layers: int, heads: int, **more: Any) -> Any:
    """A config with the other dimensions of DeepSeek-V3's attention; ``more`` has what differs."""
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    return common | more


_DSA = {"index_topk": 2048, "index_head_dim": 128}

_TESTED = Support(State.TESTED, State.TESTED)
_ON_CPU = Support(State.TESTED, State.UNTESTED)
_UNTESTED = Support(State.UNTESTED, State.UNTESTED)
NO_INDEXER = "the engine has no indexer on the CPU, nor on GPUs older than Hopper"
"""The reason of every family with sparse attention that an engine has."""
_ON_GPU = Support(State.REFUSED, State.TESTED, NO_INDEXER)
_SPARSE = Support(State.REFUSED, State.UNTESTED, NO_INDEXER)


def _absent(reason: str) -> Support:
    return Support(State.ABSENT, State.ABSENT, reason)


_NO_SUCH_MODEL = _absent("the engine has no such model")

FAMILIES = (
    ModelFamily(
        "DeepSeek-V2-Lite",
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            hidden=2048,
            layers=27,
            heads=16,
            q_lora_rank=None,
            rope_scaling=_yarn(40, 0.707),
        ),
        vllm=_TESTED,
        sglang=_TESTED,
        also="Coder-V2-Lite",
        special="YaRN",
    ),
    ModelFamily(
        "DeepSeek-V2",
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            hidden=5120,
            layers=60,
            heads=128,
            rope_scaling=_yarn(40, 0.707),
        ),
        vllm=_TESTED,
        sglang=_TESTED,
        also="V2.5, Coder-V2",
        special="YaRN",
    ),
    ModelFamily(
        "DeepSeek-V3",
        _config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            hidden=7168,
            layers=61,
            heads=128,
            rope_scaling=_yarn(40),
            num_nextn_predict_layers=1,
        ),
        vllm=_TESTED,
        sglang=_TESTED,
        also="R1, V3.1",
        special="YaRN, MTP",
    ),
    ModelFamily(
        "DeepSeek-V3.2",
        _config(
            "DeepseekV32ForCausalLM",
            "deepseek_v32",
            hidden=7168,
            layers=61,
            heads=128,
            rope_scaling=_yarn(40),
            num_nextn_predict_layers=1,
            index_n_heads=64,
            **_DSA,
        ),
        vllm=_ON_GPU,
        sglang=_ON_GPU,
        special="sparse (DSA), YaRN, MTP",
    ),
    ModelFamily(
        "Kimi-K2",
        _config(
            "DeepseekV3ForCausalLM",
            "kimi_k2",
            hidden=7168,
            layers=61,
            heads=64,
            rope_theta=50000,
            rope_scaling=_yarn(32),
        ),
        vllm=_TESTED,
        sglang=_ON_CPU,
        also="K2-Thinking; K2.5 to K2.7 wrap it",
        special="YaRN",
    ),
    ModelFamily(
        "Moonlight-16B-A3B",
        _config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            hidden=2048,
            layers=27,
            heads=16,
            q_lora_rank=None,
            rope_theta=50000,
        ),
        vllm=_TESTED,
        sglang=_ON_CPU,
        also="Kimi-VL wraps it",
    ),
    ModelFamily(
        "GLM-4.7-Flash",
        _config(
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            hidden=2048,
            layers=47,
            heads=20,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            rope_theta=1000000,
            num_nextn_predict_layers=1,
        ),
        vllm=_TESTED,
        sglang=_ON_CPU,
        special="MTP",
    ),
    ModelFamily(
        "GLM-5",
        _config(
            "GlmMoeDsaForCausalLM",
            "glm_moe_dsa",
            hidden=6144,
            layers=78,
            heads=64,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            rope_theta=1000000,
            num_nextn_predict_layers=1,
            index_n_heads=32,
            **_DSA,
        ),
        vllm=_SPARSE,
        sglang=_SPARSE,
        also="5.1 to 5.3",
        special="sparse (DSA), MTP; from 5.2 on, layers share indexers",
    ),
    ModelFamily(
        "MiniCPM3-4B",
        _config(
            "MiniCPM3ForCausalLM",
            "minicpm3",
            hidden=2560,
            layers=62,
            heads=40,
            kv_lora_rank=256,
            q_lora_rank=768,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
        ),
        vllm=Support(State.TESTED, State.UNTESTED, options="--model-impl transformers"),
        sglang=_ON_CPU,
    ),
    ModelFamily(
        "LongCat-Flash",
        _config(
            "LongcatFlashForCausalLM",
            "longcat_flash",
            hidden=6144,
            layers=28,
            heads=64,
            rope_theta=10000000,
        ),
        vllm=_ON_CPU,
        sglang=_absent("the engine (0.5.23) cannot read its config, whatever the backend"),
        special="two attentions a layer",
    ),
    ModelFamily(
        "openPangu-Ultra-MoE-718B",
        _config(
            "PanguUltraMoEForCausalLM",
            "pangu_ultra_moe",
            hidden=7680,
            layers=61,
            heads=128,
            rope_theta=25600000,
            num_nextn_predict_layers=1,
        ),
        vllm=_ON_CPU,
        sglang=_NO_SUCH_MODEL,
        special="MTP",
    ),
    ModelFamily(
        "A.X-K1",
        _config(
            "AXK1ForCausalLM",
            "axk1",
            hidden=7168,
            layers=61,
            heads=64,
            rope_scaling=_yarn(32),
        ),
        vllm=_ON_CPU,
        sglang=_NO_SUCH_MODEL,
        special="YaRN",
    ),
    ModelFamily(
        "A.X-K2-Light",
        _config(
            "AXK2ForCausalLM",
            "axk2",
            hidden=2048,
            layers=48,
            heads=32,
            kv_lora_rank=128,
            q_lora_rank=384,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            index_n_heads=16,
            **_DSA,
        ),
        vllm=_NO_SUCH_MODEL,
        sglang=_NO_SUCH_MODEL,
        special="sparse (DSA)",
    ),
    ModelFamily(
        "Kanana-2-30b-a3b",
        _config("DeepseekV3ForCausalLM", "deepseek_v3", hidden=2048, layers=48, heads=32, q_lora_rank=None),
        vllm=_ON_CPU,
        sglang=_ON_CPU,
    ),
    ModelFamily(
        "GigaChat3-10B-A1.8B",
        _config(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            hidden=1536,
            layers=26,
            heads=32,
            q_lora_rank=None,
            v_head_dim=192,
            rope_theta=100000,
        ),
        vllm=_ON_CPU,
        sglang=_ON_CPU,
        also="GigaChat3-702B-A36B",
    ),
    ModelFamily(
        "Youtu-LLM-2B",
        _config("YoutuForCausalLM", "youtu", hidden=2048, layers=32, heads=16, rope_theta=500000),
        vllm=_ON_CPU,
        sglang=_absent("the engine runs it as transformers does, without latent attention"),
    ),
    ModelFamily(
        "Sarvam-105B",
        _config(
            "SarvamMLAForCausalLM",
            "sarvam_mla",
            hidden=4096,
            layers=32,
            heads=64,
            q_lora_rank=None,
            rope_scaling={**_yarn(40), "type": "deepseek_yarn"},
        ),
        vllm=_ON_CPU,
        sglang=_ON_CPU,
        special="YaRN",
    ),
    ModelFamily(
        "Mistral-Small-4-119B",
        _config(
            "Mistral4ForCausalLM",
            "mistral4",
            hidden=4096,
            layers=36,
            heads=32,
            kv_lora_rank=256,
            q_lora_rank=1024,
            qk_nope_head_dim=64,
            rope_parameters={**_yarn(128), "rope_theta": 10000, "llama_4_scaling_beta": 0.1},
        ),
        vllm=_TESTED,
        sglang=_ON_CPU,
        special="queries scaled by position, YaRN",
    ),
    ModelFamily(
        "Mistral-Large-3-675B",
        _config(
            "MistralLarge3ForCausalLM",
            "deepseek_v3",
            hidden=7168,
            layers=61,
            heads=128,
            rope_scaling={**_yarn(36), "original_max_position_embeddings": 8192},
            llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 8192},
        ),
        vllm=_ON_CPU,
        sglang=_ON_CPU,
        special="queries scaled by position, YaRN",
    ),
    ModelFamily(
        "GLM-5.3-Flash",
        _config(
            "Glm5NextForCausalLM",
            "glm5_next_text",
            hidden=4096,
            layers=45,
            heads=64,
            qk_nope_head_dim=256,
            qk_rope_head_dim=0,
            v_head_dim=256,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 11 + ["linear_attention"],
            index_n_heads=32,
            index_kpool=16,
            **_DSA,
        ),
        vllm=_ON_GPU,
        sglang=_SPARSE,
        special="no rotary part, sparse (DSA) with pooled keys; 34 of 45 layers are linear",
    ),
    ModelFamily(
        "Kimi-K3",
        _config(
            "KimiLinearForCausalLM",
            "kimi_linear",
            hidden=7168,
            layers=93,
            heads=96,
            linear_attn_config={"full_attn_layers": [*range(4, 93, 4), 93]},
        ),
        vllm=_UNTESTED,
        sglang=_UNTESTED,
        special="keys are not rotated; 69 of 93 layers are linear",
    ),
    ModelFamily(
        "Kimi-Linear-48B-A3B",
        _config(
            "KimiLinearForCausalLM",
            "kimi_linear",
            hidden=2304,
            layers=27,
            heads=32,
            q_lora_rank=None,
            linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
        ),
        vllm=_ON_CPU,
        sglang=_ON_CPU,
        special="keys are not rotated; 20 of 27 layers are linear",
    ),
    ModelFamily(
        "Ling-3.0-tiny",
        _config(
            "BailingMoeV3ForCausalLM",
            "bailing_hybrid",
            hidden=1536,
            layers=24,
            heads=16,
            q_lora_rank=256,
            layer_group_size=4,
        ),
        vllm=_UNTESTED,
        sglang=_UNTESTED,
        also="Ling-3.0-flash, 3.1",
        special="gated output; 3 of 4 layers are linear; in SGLang, a form with latents of 512 + 0 is tested "
        "on the CPU, and `use_mla_nope` with 64 rotary columns is refused",
    ),
    ModelFamily(
        "Ling-2.6-flash",
        _config(
            "BailingMoeV2_5ForCausalLM",
            "bailing_hybrid",
            hidden=4096,
            layers=32,
            heads=32,
            layer_group_size=8,
        ),
        vllm=_UNTESTED,
        sglang=_UNTESTED,
        also="Ling-2.6-1T, Ling-2.5, Ring-2.5",
        special="7 of 8 layers are linear",
    ),
    ModelFamily(
        "HY-V4",
        _config(
            "HYV4ForCausalLM",
            "hy_v4",
            hidden=2816,
            layers=34,
            heads=32,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_n_heads=16,
            learnable_sink=True,
            **_DSA,
        ),
        vllm=_SPARSE,
        sglang=_SPARSE,
        special="sparse (DSA), sinks, gated output",
    ),
)
"""Every family of the table. Of families that a model resembles alike, the first one counts."""
