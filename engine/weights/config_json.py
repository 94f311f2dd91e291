"""Every key of a config.json is one that the config's class has, known to be harmless, or told; rope in one form."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ModelError
from ...core.outside import quote
from ...core.surfaces.surface import surface


def require_config_read(name: str, given: Mapping[str, Any], config: Any) -> None:
    """Raise ModelError for what a config.json says and the model of its class would be computed without.

    Args:
        name: path or hub name.
        given: as it stands in the file.
        config: what transformers has made of it.
    """
    what = f"the config.json of '{name}'"
    # Qwen2's layers have biases without a key that says so; MiMo's config.json has one
    biases = {"attention_bias", "qkv_bias"} if config.model_type == "qwen2" else set()
    surface("config").require(given, what, error=ModelError, also=_declared(config) | biases)
    ropes = {key: given.get(key) for key in ("rope_parameters", "rope_scaling")}
    for key, rope in ropes.items():
        for one in _forms(rope):
            surface("config.rope").require(one, f"'{key}' of {what}", error=ModelError)
    _require_one_rope(what, given, ropes)
    types = [given[key] for key in ("dtype", "torch_dtype") if given.get(key) is not None]
    if len(types) == 2 and types[0] != types[1]:
        raise ModelError(
            f"{what} has dtype {quote(types[0])} and torch_dtype {quote(types[1])}; expected one; fix it"
        )
    text = config.get_text_config()
    if text is not config and isinstance(given.get("text_config"), Mapping):
        require_config_read(name, given["text_config"], text)


def _declared(config: Any) -> set[str]:
    """Keys that the class takes: of its constructor, of its fields, and other names of those."""
    kind = type(config)
    parts = getattr(kind, "sub_configs", None) or {}
    fields = getattr(kind, "__dataclass_fields__", {})
    parameters = {*inspect.signature(kind.__init__).parameters} - {"self"}
    # files are written with either name
    names = kind.attribute_map or {}
    return {*parameters, *fields, *names, *names.values(), *parts}


def _forms(rope: Any) -> list[Mapping[str, Any]]:
    """A rope, or those of the kinds of layers within it."""
    if not isinstance(rope, Mapping):
        return []
    within = [one for one in rope.values() if isinstance(one, Mapping)]
    return [rope, *within]


def _require_one_rope(what: str, given: Mapping[str, Any], ropes: Mapping[str, Any]) -> None:
    """Raise ModelError where the forms of transformers 4 and 5 say unlike things: each version reads another."""
    new, old = ropes["rope_parameters"], ropes["rope_scaling"]
    if not isinstance(new, Mapping) or any(isinstance(one, Mapping) for one in new.values()):
        return
    pairs = {("rope_theta", "rope_parameters.rope_theta"): (given.get("rope_theta"), new.get("rope_theta"))}
    if isinstance(old, Mapping):
        for key in {*old, *new} - {"type", "rope_theta"}:
            pairs[f"rope_scaling.{key}", f"rope_parameters.{key}"] = (old.get(key), new.get(key))
    elif new.get("rope_type", "default") != "default" and "rope_theta" in given:
        pairs["rope_scaling", "rope_parameters.rope_type"] = (None, new["rope_type"])
    for (first, second), (one, other) in sorted(pairs.items()):
        if one != other and not (first == "rope_theta" and None in (one, other)):
            raise ModelError(
                f"{what} has {first} {quote(one)} and {second} {quote(other)}: versions of transformers read the one "
                "or the other; expected the same; fix it"
            )


def write_older_names(file: Path) -> None:
    """Add to a saved config.json what transformers 4, and servers like it, read in place of names of transformers 5."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    for section in (tree, tree.get("text_config")):
        if not isinstance(section, dict):
            continue
        rope = section.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            is_plain = scaling.get("rope_type", "default") == "default"
            section |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if is_plain else scaling}
            section |= {key: rope[key] for key in ("partial_rotary_factor",) if key in rope}
        if "dtype" in section:
            section["torch_dtype"] = section["dtype"]
    file.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n", encoding="utf-8")
