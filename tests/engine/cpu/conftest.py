"""Without the extra `cpu` there is nothing to test here."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("llvmlite") is not None else ["test_*.py"]
