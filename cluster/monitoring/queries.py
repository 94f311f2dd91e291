"""PromQL over the exported metrics, by their declared names: a query cannot name a metric that nobody sets.

`{NAME}` stands for a series: a name of `core.exported_metrics`, or a figure of `core.metric_registry` such as
`{reward/mean}`; `[rate]` for the window of a rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.core.exported_metrics import RAY_SERIES, exported_figure, find_live

SUFFIXES = ("_bucket", "_sum", "_count")
"Of a histogram's parts."
_NAMED = re.compile(r"\{([a-z_0-9/]+)\}")


def promql(template: str, *, run: str, rate: str) -> str:
    """The query with every name in its place.

    Args:
        template: as this module says.
        run: the matcher in braces of every series of ours, such as `{run=~"$run"}`; may be empty.
        rate: window, such as `1m`.
    """
    query = _NAMED.sub(lambda match: _series(match[1]) + ("" if match[1] in RAY_SERIES else run), template)
    return query.replace("[rate]", f"[{rate}]")


def names_of(template: str) -> Iterator[str]:
    """The names in a template."""
    return (match[1] for match in _NAMED.finditer(template))


def _series(name: str) -> str:
    if name in RAY_SERIES:
        return name
    if "/" in name:
        figure = exported_figure(name)
        if figure is not None:
            return figure.series
    else:
        suffix = next((one for one in SUFFIXES if name.endswith(one)), "")
        live = find_live(name.removesuffix(suffix))
        if live is not None and bool(suffix) == (live.kind == "histogram"):
            return live.series + suffix
    raise RlhfSpecError(
        f"a query names {name}, which is not declared; expected a name of core/exported_metrics.py or a figure of "
        "core/metric_registry.py"
    )
