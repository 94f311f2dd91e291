"""What grew while a program ran: the last sixth of the time beside the second one; the first is for warming up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Sample = dict[str, float]
"Of one moment: figures by name, memory in MiB."
MEMORY_LIMIT = 1.05
"Of late over early: the bar."
FILES_LIMIT = 1.02
"A dozen of a thousand come and go with connections."
_SUFFIX = "_late_over_early"
LEFT_LIMIT_MIB = 1.0
JUDGED_FROM_MINUTES = 30.0
"A shorter run is still warming up in its second sixth."


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """For every figure of the samples: its mean over the last sixth, over that of the second sixth."""
    sixth = max(len(samples) // 6, 1)
    early, late = samples[sixth : 2 * sixth] or samples[:sixth], samples[-sixth:]
    found = {}
    for name in samples[-1]:
        means = [sum(one[name] for one in part) / len(part) for part in (late, early)]
        # from nothing to something is growth without bound; a figure must be finite
        found[name + _SUFFIX] = means[0] / means[1] if means[1] else 1.0 + means[0]
    return found


def grown(figures: Mapping[str, float]) -> list[str]:
    """What must not have grown and has, a line each, from the figures of a soak."""
    lines = []
    if figures["minutes"] >= JUDGED_FROM_MINUTES:
        for name, ratio in figures.items():
            what = name.removesuffix(_SUFFIX)
            limit = _limit(what)
            if what != name and ratio > limit:
                lines.append(f"{what} grew to {ratio:.3f} of what it was early; expected at most {limit:g}")
    for name, limit, what in (
        ("processes_left", 0.0, "processes were left"),
        ("shared_memory_left_mib", LEFT_LIMIT_MIB, "MiB of shared memory were left (by this run or another)"),
        ("spilled_peak_mib", 0.0, "MiB of objects were written to disk: the object store was full"),
    ):
        if figures[name] > limit:
            lines.append(f"{figures[name]:.4g} {what}; expected at most {limit:g}")
    if figures["object_store_peak_mib"] > figures["object_store_size_mib"]:
        lines.append(
            f"the object store took {figures['object_store_peak_mib']:.0f} MiB; expected at most its size, "
            f"{figures['object_store_size_mib']:.0f} MiB"
        )
    return lines


def _limit(what: str) -> float:
    if what == "num_processes":
        return 1.0
    return MEMORY_LIMIT if what.endswith("_mib") else FILES_LIMIT
