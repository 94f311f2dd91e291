"""What a Python script gives a trainer of TRL, read without running it.

Literals and the names that are bound to them are followed. What only a run could know stands as `$(expression)`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

_CONFIGS: Mapping[str, str] = MappingProxyType(
    {
        "GRPOConfig": "grpo",
        "RLOOConfig": "rloo",
        "PPOConfig": "ppo",
        "SFTConfig": "sft",
        "RewardConfig": "reward",
        "DPOConfig": "dpo",
    }
)
_DATA = ("dataset_name", "dataset_config")


def read_script(text: str) -> tuple[str, dict[str, Any]] | None:
    """The kind of run and the keys, by their names on TRL's command line; None for what makes no config of TRL's.

    Functions that are rewards become `reward.py.NAME`: a file of their own, since importing the script would train.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    config = next((call for call in calls if _name(call) in _CONFIGS), None)
    if config is None:
        return None
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    of_trl = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl")
        for alias in node.names
    }
    kind, given = _CONFIGS[_name(config)], dict[str, Any]()
    for call in calls:
        if _name(call) == "LoraConfig":
            given["use_peft"] = True
            given |= {f"lora_{key.removeprefix('lora_')}": value for key, value in _keywords(call, known)}
        elif _name(call) == "load_dataset" and "dataset_name" not in given:
            given |= {key: _value(one, known) for key, one in zip(_DATA, call.args, strict=False)}
            split = dict(_keywords(call, known)).get("split")
            if split is not None:
                given["dataset_train_split"] = split[0] if isinstance(split, list) and split else split
        elif _name(call) in ("map", "filter") and isinstance(call.func, ast.Attribute) and call.args:
            given["dataset.map"] = f"$({ast.unparse(call.args[0])})"
        elif _name(call).endswith("Trainer"):
            given |= _of_trainer(call, known, of_trl)
    return kind, given | dict(_keywords(config, known))


def _of_trainer(call: ast.Call, known: Mapping[str, ast.expr], of_trl: set[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in call.keywords:
        node = word.value
        if word.arg == "model":
            node = known.get(node.id, node) if isinstance(node, ast.Name) else node
            if isinstance(node, ast.Call) and _name(node) == "from_pretrained" and node.args:
                given |= {
                    key: value for key, value in _keywords(node, known) if key in ("dtype", "torch_dtype")
                }
                node = node.args[0]
            given["model_name_or_path"] = _value(node, known)
        elif word.arg == "reward_funcs":
            several = node.elts if isinstance(node, ast.List) else [node]
            given["reward_funcs"] = [
                f"{'' if one.id in of_trl else 'reward.py.'}{one.id}"
                if isinstance(one, ast.Name)
                else _value(one, known)
                for one in several
            ]
    return given


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _keywords(call: ast.Call, known: Mapping[str, ast.expr]) -> Iterator[tuple[str, Any]]:
    for word in call.keywords:
        yield word.arg or f"**{ast.unparse(word.value)}", _value(word.value, known)


def _value(node: ast.expr, known: Mapping[str, ast.expr]) -> Any:
    """A literal, also by a name or of torch; else the expression, as what is left open."""
    if isinstance(node, ast.Name) and node.id in known and not isinstance(known[node.id], ast.Name):
        return _value(known[node.id], known)
    if ast.unparse(node).startswith("torch.") and isinstance(node, ast.Attribute):
        return node.attr
    try:
        return json.loads(json.dumps(ast.literal_eval(node)))  # tuples as lists; no sets, no `...`
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"$({ast.unparse(node)})"
