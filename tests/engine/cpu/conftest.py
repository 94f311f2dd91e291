"""Without the extra `cpu` there is nothing to test here."""

from rlhfspec.engine.numerics import has_llvm

collect_ignore_glob = [] if has_llvm() else ["test_*.py"]
