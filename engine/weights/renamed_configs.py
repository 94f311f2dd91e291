"""Lets transformers read checkpoints of a family it does not know, where the model is one that it knows.

MiMo-7B (`model_type` mimo, arXiv 2505.07608) brings code of its own, which is Qwen2's with an MTP layer beside it that
no forward of the model calls: its config is read as Qwen2's, and its code is neither needed nor run.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Qwen2Config

MIMO = "mimo"
_NOT_OURS = ("model_type", "architectures", "auto_map", "num_nextn_predict_layers")


class MimoConfig(Qwen2Config):
    """Reads a MiMo's config.json; what comes of it is a `Qwen2Config`."""

    model_type = MIMO

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **settings: Any) -> Any:
        """Return what `Qwen2Config.from_dict` makes of these values: with `return_unused_kwargs` a pair."""
        values = {key: value for key, value in config_dict.items() if key not in _NOT_OURS}
        return Qwen2Config.from_dict(values | {"architectures": ["Qwen2ForCausalLM"]}, **settings)


def register_renamed() -> None:
    """Register them; transformers' own config of that name, should it come to have one, is overridden."""
    AutoConfig.register(MIMO, MimoConfig, exist_ok=True)
