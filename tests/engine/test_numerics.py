"""Which back end an engine takes."""

import sys

import torch

from rlhfspec.engine.numerics import has_llvm, resolve_device


def test_a_gpu_has_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("auto") == torch.device("cuda", 3)
    assert resolve_device("cuda") == torch.device("cuda", 3)
    assert resolve_device("cpu") == torch.device("cpu")


def test_folders_that_an_uninstall_left_are_no_llvmlite(tmp_path, monkeypatch):
    (tmp_path / "llvmlite/ir/__pycache__").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llvmlite", raising=False)
    assert not has_llvm.__wrapped__()
    (tmp_path / "llvmlite/__init__.py").touch()
    assert has_llvm.__wrapped__()
