"""Pages in the key-value store of Ray's head, where whoever joins the cluster finds them. Bounded."""

from __future__ import annotations

from typing import Any, Protocol

from rlhfspec.cluster.observing.live_page import STORE, LivePage

KEPT_PAGES = 20
"Of runs that tell nothing any more; one that was killed cannot take its own away."
SILENT_S = 3600.0


class Store(Protocol):
    """What Ray's `internal_kv` has of it."""

    def _internal_kv_list(self, prefix: bytes, *, namespace: bytes) -> list[bytes] | None: ...
    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None: ...
    def _internal_kv_put(self, key: bytes, value: bytes, *, namespace: bytes) -> Any: ...
    def _internal_kv_del(self, key: bytes, *, namespace: bytes) -> Any: ...


def store_page(run: str, text: bytes | None) -> None:
    """Put the page there; None: take it away."""
    store = _ray_store()
    if text is None:
        store._internal_kv_del(run.encode(), namespace=STORE)
    else:
        store._internal_kv_put(run.encode(), text, namespace=STORE)


def stored_pages(store: Store | None = None) -> list[LivePage]:
    """The pages of all runs that can be read."""
    return [page for _, page in _pages(store or _ray_store()) if page is not None]


def drop_old_pages(now: float, store: Store | None = None) -> None:
    """Of the runs that told nothing for an hour keep the last KEPT_PAGES, and no page that cannot be read.

    A run that lives all the same puts its page there again. `now` in seconds since the epoch.
    """
    store = store or _ray_store()
    pages = _pages(store)
    silent = sorted((page.told_at, key) for key, page in pages if page and now - page.told_at > SILENT_S)
    dropped = [key for key, page in pages if page is None] + [key for _, key in silent[:-KEPT_PAGES]]
    for key in dropped:
        store._internal_kv_del(key, namespace=STORE)


def _pages(store: Store) -> list[tuple[bytes, LivePage | None]]:
    keys = store._internal_kv_list(b"", namespace=STORE) or []
    return [(key, LivePage.decode(store._internal_kv_get(key, namespace=STORE) or b"")) for key in keys]


def _ray_store() -> Store:
    from ray.experimental import internal_kv

    return internal_kv
