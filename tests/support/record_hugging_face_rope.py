"""Records how transformers stretches rotary positions: `tests/data/hugging_face_rope.json`.

    python -m tests.support.record_hugging_face_rope

The configs are those of the models on the hub, cut to what rotary positions read. Needs torch and
transformers ≥ 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DEEPSEEK = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "rope_theta": 10000.0,
}
PAIRS = range(48)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + pair / 40 for pair in PAIRS],
    "long_factor": [1 + pair**2 / 40 for pair in PAIRS],
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
# The sequence for which a stretch is asked, and the longest of pretraining, where it matters.
LENGTHS = {
    "dynamic NTK, longer than pretrained": (8192, 2048),
    "LongRoPE, short": (4096, 131072),
    "LongRoPE, long": (131072, 131072),
}
# name → model type, head_dim of what is rotated, rope_parameters of its config.json
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B": (
        "llama",
        128,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "meta-llama/Llama-3.2-1B": (
        "llama",
        64,
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "google/gemma-3-4b-pt": (
        "llama",
        256,
        {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    ),
    "deepseek-ai/DeepSeek-V3": (
        "deepseek_v3",
        64,
        DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-ai/DeepSeek-V2": (
        "deepseek_v3",
        64,
        DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        64,
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "rope_theta": 150000.0,
        },
    ),
    "dynamic NTK, longer than pretrained": (
        "llama",
        128,
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "LongRoPE, short": ("llama", 96, LONGROPE),
    "LongRoPE, long": ("llama", 96, LONGROPE),
}


def recorded(name: str, kind: str, width: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Radians per token of each pair, the factor of the rotated, and MLA's factor of scores."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    length, longest = LENGTHS.get(name, (None, 131072))
    config = AutoConfig.for_model(
        kind, head_dim=width, max_position_embeddings=longest, rope_parameters=parameters
    )
    if kind == "deepseek_v3":
        config.qk_rope_head_dim = width
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, device="cpu", seq_len=length
    )
    answer: dict[str, Any] = {"frequencies": frequencies.tolist(), "output_scale": scale}
    if kind == "deepseek_v3":
        answer["scores_scale"] = DeepseekV3Attention(config, 0).scaling
        answer["qk_head_dim"] = config.qk_head_dim
    return answer


def main() -> None:
    """Writes the file."""
    import transformers

    path = Path(__file__).parents[1] / "data" / "hugging_face_rope.json"
    models = {name: recorded(name, *entry) for name, entry in MODELS.items()}
    answer = {"source": f"transformers {transformers.__version__}", "models": models}
    path.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
