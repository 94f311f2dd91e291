"""Settings that there were once: a config that names one is refused, with what to use instead.

Run folders spell every default out: a removed key that holds what the product does now is dropped, so that runs of
before can be read, verified and resumed.
"""

from __future__ import annotations

from typing import Any

_ADAPTIVE = "use goodput or bandit, which adapt to the batch, or fixed"
_SUFFIX = "use suffix, which looks in the sample's own text and in all responses to its prompt"
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "speculation.drafter": {
        "early_exit": "use suffix, which needs no weights either, or head (`rlhfspec drafter make`)",
        "ngram": _SUFFIX,
    },
    "speculation.look_up": {"ngram": _SUFFIX},
    "speculation.policy": {"batch_table": _ADAPTIVE, "capacity": _ADAPTIVE},
    "rollout.weight_load": {"keep_kv": "use reprefill: the new weights compute the caches anew"},
}
"Of keys that stay: a value, and what to use instead."

REMOVED_KEYS: dict[str, tuple[tuple[object, ...], str]] = {
    "speculation.exit_layers": ((0,), "it was of drafter early_exit: take it out"),
    "speculation.ngram_max": ((4,), "it was of drafter ngram: see speculation.suffix_min"),
    "speculation.ngram_min": ((2,), "it was of drafter ngram: see speculation.suffix_min"),
    "speculation.capacity_tokens": ((24,), "it was of policy capacity: take it out"),
    "trainer.stream_forwards": (
        ("auto", "off", False),
        "take it out; rollout.max_staleness 1 hides the whole update behind the next rollout",
    ),
}
"Keys: values that say what happens now anyway, and what to do instead of any other."

REMOVED_CODE = {
    "rlhfspec.learning.tasks.chain_task:ChainReward": "use kind chain; in Python chain_reward",
    "rlhfspec.learning.tasks.gsm8k:Gsm8kReward": "use kind gsm8k; in Python gsm8k_reward",
    "rlhfspec.learning.tasks.one_sentence:OneSentenceReward": "use kind one_sentence; in Python one_sentence_reward",
}
"Code of ours by its path, and what to name instead."


def without_removed(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config's sections without removed keys that say nothing, and a fault for every other removed setting."""
    kept = {name: dict(held) if isinstance(held, dict) else held for name, held in tree.items()}
    faults = []
    for key, instead_of in REMOVED_VALUES.items():
        section, name = key.split(".")
        value = held.get(name) if isinstance(held := kept.get(section), dict) else None
        if isinstance(value, str) and value in instead_of:
            faults.append(f"{key} {value} was removed; {instead_of[value]}")
    for key, (harmless, instead) in REMOVED_KEYS.items():
        section, name = key.split(".")
        held = kept.get(section)
        if isinstance(held, dict) and name in held and held.pop(name) not in harmless:
            faults.append(f"{key} was removed; {instead}")
    return kept, faults
