"""The table of instances stays bounded, and knows what those have done that it dropped. No Ray."""

from __future__ import annotations

from typing import Any

from rlhfspec.cluster.system.instance_table import Instance, InstanceTable
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.policies.scheduling.members import KEPT_GONE, InstanceState

NO_HANDLE: Any = None


def test_of_instances_that_are_gone_the_last_are_kept_and_the_work_of_all() -> None:
    table = InstanceTable()
    table["old"] = Instance(handle=NO_HANDLE, num_slots=1, state=InstanceState.SERVING)
    many = 3 * KEPT_GONE
    for number in range(many):
        table[f"gen-{number}"] = row = Instance(handle=NO_HANDLE, num_slots=1)
        row.state, row.stats = InstanceState.GONE, GenerationStats(num_emitted_tokens=10)
    table["old"].state = InstanceState.GONE
    table["last"] = Instance(handle=NO_HANDLE, num_slots=1)
    assert len(table) == KEPT_GONE + 1 and {"old", "last", f"gen-{many - 1}"} <= set(table)
    assert table.stats.num_emitted_tokens == 10 * many
