"""The processes below one, whoever started them; Linux."""

from __future__ import annotations

from rlhfspec.core.proc_files import PARENT, PROC, stat_fields


def descendants(root: int) -> set[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if fields:
            children.setdefault(int(fields[PARENT]), []).append(int(entry.name))
    found, left = set(), [root]
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found
