"""Which back end an engine takes."""

import sys

from rlhfspec.engine.numerics import has_llvm


def test_folders_that_an_uninstall_left_are_no_llvmlite(tmp_path, monkeypatch):
    (tmp_path / "llvmlite/ir/__pycache__").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llvmlite", raising=False)
    assert not has_llvm.__wrapped__()
    (tmp_path / "llvmlite/__init__.py").touch()
    assert has_llvm.__wrapped__()
