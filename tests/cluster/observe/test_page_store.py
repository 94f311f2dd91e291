"""Pages of runs that were killed do not pile up in the head's store. No Ray: the store is a dict."""

from __future__ import annotations

from dataclasses import replace

from live_pages import NOW, PAGE

from rlhfspec.cluster.observe.live_page import KEPT_PAGES, SILENT_S, drop_old_pages, stored_pages


class DictStore(dict[bytes, bytes]):
    """What Ray's `internal_kv` has of a store."""

    def _internal_kv_list(self, prefix: bytes, *, namespace: bytes) -> list[bytes]:
        return list(self)

    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.get(key)

    def _internal_kv_put(self, key: bytes, value: bytes, *, namespace: bytes) -> None:
        self[key] = value

    def _internal_kv_del(self, key: bytes, *, namespace: bytes) -> None:
        del self[key]


def test_of_runs_that_were_killed_the_last_pages_are_kept() -> None:
    store = DictStore({b"damaged": b"{"})
    for number in range(3 * KEPT_PAGES):
        page = replace(PAGE, run=f"killed-{number}", told_at=NOW - SILENT_S - 1.0 - number)
        store[page.run.encode()] = page.encode()
    for number in range(2 * KEPT_PAGES):
        page = replace(PAGE, run=f"alive-{number}", told_at=NOW - SILENT_S + 1.0)
        store[page.run.encode()] = page.encode()
    drop_old_pages(NOW, store)
    alive = {f"alive-{number}" for number in range(2 * KEPT_PAGES)}
    kept = {page.run for page in stored_pages(store)}
    assert kept == alive | {f"killed-{number}" for number in range(KEPT_PAGES)} and len(store) == len(kept)
