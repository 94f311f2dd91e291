"""Models of Qwen2.5's sizes as a hub's cache has them before their weights come: config.json and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from rlhfspec.learning.models.tokenization import character_tokenizer

SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936),
    "1.5B": (1536, 8960, 28, 12, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
}
"Hidden size, of the MLP, layers, heads, of keys and values, vocabulary, as their config.json says."
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def described(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let `Qwen/Qwen2.5-SIZE-Instruct` be found in a cache of this test's own, and nothing be asked for elsewhere."""
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = _TEMPLATE
    for name, (hidden, mlp, layers, heads, kv_heads, vocab) in SIZES.items():
        repo = cache / f"models--Qwen--Qwen2.5-{name}-Instruct"
        folder = repo / "snapshots" / "0"
        folder.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0")
        sizes = {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "tie_word_embeddings": name in ("0.5B", "1.5B"),
            "max_position_embeddings": 32768,
        }
        (folder / "config.json").write_text(json.dumps(sizes))
        tokenizer.save_pretrained(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
