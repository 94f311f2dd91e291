"""How responses are scored."""

from __future__ import annotations

from pydantic import Field

from core.settings.section import Name, Section


class RewardConfig(Section):
    """How a response is scored."""

    kind: str = "chain"
    """`chain`, `one_sentence`, `gsm8k`, `model`, `environment` (what its steps give), or a Python function as
    `package.module:function`"""
    model: Name | None = None
    "kind model: path or hub name of a sequence-classification model"
    batch_size: int = Field(default=32, ge=1)
