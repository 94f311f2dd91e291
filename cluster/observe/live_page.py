"""The page that a run keeps of itself: what it does now, for whom it waits, how its instances stand.

The observer writes it into the run folder and into the key-value store of Ray's head, whence `rlhfspec status`
reads it. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

STORE = b"rlhfspec"
"Namespace of the key-value store."
PAGE_EVERY_S = 2.0
STALE_AFTER_S = 30.0
STARTING = "starting"
"The phase before the first iteration of this process."


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """One generation instance."""

    name: str
    state: str
    num_owned: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    tokens_per_s: float = 0.0
    acceptance_length: float = 0.0
    "since it began"
    weight_version: int = 0
    silent_s: float = 0.0
    activity: str = ""
    "busy, idle or training, for so many seconds"
    activity_s: float = 0.0
    drafter_alarm: str = ""
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """One wait that is open."""

    waiter: str
    waited_for: str
    order: str
    since: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One line for people."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePage:
    """Everything at one moment."""

    run: str
    folder: str
    namespace: str
    pid: int
    host: str
    told_at: float
    ended: bool = False
    ray_address: str = ""
    num_iterations: int
    iteration: int = 0
    "in progress, counted from 0"
    phase: str = ""
    phase_since: float
    done: int = 0
    total: int = 0
    progress_at: float
    "when any of these, or the number of tokens, last changed"
    weight_version: int = 0
    scheduler_silent_s: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    "of the last iteration"
    instances: tuple[InstanceRow, ...] = ()
    waits: tuple[WaitRow, ...] = ()
    events: tuple[EventRow, ...] = ()

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Self | None:
        """Read what `encode` wrote; None where it is damaged, or of a version that had other fields."""
        with suppress(ValueError, TypeError, KeyError, RecursionError, AttributeError):
            tree: dict[str, Any] = json.loads(text)
            rows = {"instances": InstanceRow, "waits": WaitRow, "events": EventRow}
            tree |= {key: tuple(row(**one) for one in tree[key]) for key, row in rows.items()}
            return cls(**tree)
        return None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a run folder's `live.json`; None without one."""
        try:
            return cls.decode(path.read_bytes())
        except OSError:
            return None


KEPT_PAGES = 20
"Of runs that tell nothing any more; one that was killed cannot take its own away."
SILENT_S = 3600.0


def store_page(run: str, text: bytes | None) -> None:
    """Put the page there; None: take it away."""
    store = _ray_store()
    if text is None:
        store._internal_kv_del(run.encode(), namespace=STORE)
    else:
        store._internal_kv_put(run.encode(), text, namespace=STORE)


def stored_pages(store: Any = None) -> list[LivePage]:
    """The pages of all runs that can be read; `store` as Ray's `internal_kv`."""
    return [page for _, page in _pages(store or _ray_store()) if page is not None]


def drop_old_pages(now: float, store: Any = None) -> None:
    """Of the runs that told nothing for an hour keep the last KEPT_PAGES, and no page that cannot be read.

    A run that lives all the same puts its page there again. `now` in seconds since the epoch.
    """
    store = store or _ray_store()
    pages = _pages(store)
    silent = sorted((page.told_at, key) for key, page in pages if page and now - page.told_at > SILENT_S)
    dropped = [key for key, page in pages if page is None] + [key for _, key in silent[:-KEPT_PAGES]]
    for key in dropped:
        store._internal_kv_del(key, namespace=STORE)


def _pages(store: Any) -> list[tuple[bytes, LivePage | None]]:
    keys = store._internal_kv_list(b"", namespace=STORE) or []
    return [(key, LivePage.decode(store._internal_kv_get(key, namespace=STORE) or b"")) for key in keys]


def _ray_store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
