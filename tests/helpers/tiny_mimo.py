"""A tiny random checkpoint in MiMo-7B's form: Qwen2's layers with an MTP layer beside them, in shards with an index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
}
MTP_FILE = "model-mtp.safetensors"


def write_tiny_mimo(folder: Path, *, seed: int = 1, num_mtp_layers: int = 1, **changes: Any) -> Path:
    """Write it; `changes` are of the config. Its weights have bfloat16's precision, its biases and gains are random."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes)))
    model.lm_head.weight.data.mul_(3.0)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.copy_(shaken(name, weight.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    # as Xiaomi's have it, the code of its own included
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
        "num_nextn_predict_layers": num_mtp_layers,
        "rope_theta": rope["rope_theta"],
        "attention_bias": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        f"model.mtp_layers.{layer}.{name}": tensor
        for layer in range(num_mtp_layers)
        for name, tensor in mtp_tensors(model.config).items()
    }
    write_mtp(folder, tensors)
    return folder


def write_mtp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a shard of its own for these beside the model's, and the index of both."""
    (folder / "model.safetensors").rename(folder / "model-rest.safetensors")
    index_mtp(folder, tensors)


def index_mtp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put other tensors into the shard of the MTP layer, and into the index."""
    save_file(tensors, folder / MTP_FILE, metadata={"format": "pt"})
    rest = dict.fromkeys(load_file(folder / "model-rest.safetensors"), "model-rest.safetensors")
    index = {"metadata": {}, "weight_map": rest | dict.fromkeys(tensors, MTP_FILE)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored_mtp(folder: Path) -> dict[str, Tensor]:
    """The tensors of that shard."""
    return load_file(folder / MTP_FILE)


def mtp_tensors(config: Qwen2Config) -> dict[str, Tensor]:
    """Random ones of one layer, by MiMo's names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = hidden // config.num_attention_heads * config.num_key_value_heads
    matrices = {
        "input_proj": (hidden, 2 * hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {f"{name}.weight": torch.randn(shape) * 0.1 for name, shape in matrices.items()}
    tensors |= {
        f"self_attn.{each}_proj.bias": shaken(".bias", (size,))
        for each, size in zip("qkv", (hidden, kv, kv), strict=True)
    }
    for each in ("token", "hidden", "input", "post_attention", "final"):
        tensors[f"{each}_layernorm.weight"] = shaken("norm.weight", (hidden,))
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def shaken(name: str, shape: Any) -> Tensor:
    """Random biases around 0, gains around 1."""
    return torch.randn(shape) * 0.2 + (0.0 if name.endswith("bias") else 1.0)
