"""Programs that try to get out of the sandbox, or to take the machine with them: none may, and each has its name."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfspec.learning.sandbox.sandbox import Limits, Sandbox

LIMITS = Limits(wall_s=3.0, memory_mb=256, disk_mb=8, output_bytes=1 << 18)
ESCAPED = "ESCAPED"
SECRET = "a-secret-of-the-run"
CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
SAID = f"print('{ESCAPED}' if {{}} == 0 else ctypes.get_errno())"

FAULTS = {
    "a listener of the machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1); print('ESCAPED')",
    "the machine's address": "import socket\nsocket.create_connection(('{address}', {port}), 1); print('ESCAPED')",
    "the host of a virtual machine": "import socket\nsocket.socket(socket.AF_VSOCK); print('ESCAPED')",
    "a pair of another family": "import socket\nsocket.socketpair(socket.AF_TIPC); print('ESCAPED')",
    "packets": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')",
    "the kernel's ciphers": "import socket\nsocket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); print('ESCAPED')",
    "the parent's environment": "print(open('/proc/{pid}/environ').read(), 'ESCAPED')",
    "a signal to the parent": "import os\nos.kill({pid}, 0); print('ESCAPED')",
    "a file of the run": "print(open('{file}').read(), 'ESCAPED')",
    "a file beside the run": "open('{file}.new', 'w').write('x'); print('ESCAPED')",
    "a file of Python": "import os\nopen(os.path.dirname(os.__file__) + '/sitecustomize.py', 'w'); print('ESCAPED')",
    "a device": "open('/dev/mem', 'rb'); print('ESCAPED')",
    "the user of before": "import os\nos.setuid({other}); print('ESCAPED')",
    "shared memory of nobody": "import os\nos.memfd_create('x'); print('ESCAPED')",
}
"Each ends with an error."
DENIED = {
    "ptrace of the parent": "libc.ptrace(16, {pid}, 0, 0)",
    "memory of the parent": "libc.process_vm_readv({pid}, None, 0, None, 0, 0)",
    "a user namespace": "libc.unshare(0x10000000)",
    "a child in a user namespace": "int(libc.syscall({clone}, 0x10000011, 0, 0, 0, 0) < 0)",
    "a mount": "libc.mount(b'tmpfs', b'/dev', b'tmpfs', 0, None)",
    "System V memory": "int(libc.shmget(0, 4096, 0o1600) < 0)",
    "a key of the kernel": "int(libc.syscall({keyctl}, 0, -3, 0) < 0)",
}
ENDED = {
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "memory": ("bytearray(1 << 30)", "memory"),
    "memory of a child": (
        "import os\nif os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\nbytearray(1 << 29)",
        "memory",
    ),
    "disk": ("for at in range(99):\n    open(str(at), 'wb').write(bytes(1 << 20))", "error"),
    "a hung C call": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "timeout"),
    "signals that are blocked": (
        "import signal, time\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True:\n    time.sleep(9)",
        "timeout",
    ),
    "a hundred thousand lines": ("for at in range(100_000): print('line', at)", "output"),
    "output without end": ("import os\nwhile True: os.write(2, b'x' * 65536)", "output"),
    "an end in C": ("import ctypes\nctypes.string_at(0)", "error"),
    "threads without end": (
        "import threading, time\nfor _ in range(99):\n    threading.Thread(target=time.sleep, args=(1,)).start()",
        "error",
    ),
    "an exit": ("import os\nos._exit(3)", "error"),
    "its own group": ("import os, signal, time\nos.kill(0, signal.SIGKILL); time.sleep(9)", None),
    "open files": ("keep = [open('/dev/null') for _ in range(99)]", "error"),
}


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "none"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    box = Sandbox(LIMITS, max_concurrent=1, namespaces=request.param)
    if request.param and box.holds["missing"]:
        box.close()
        pytest.skip(f"no namespaces here: {box.holds['missing']}")
    yield box
    box.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[int]:
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server.getsockname()[1]


def still_serves(box: Sandbox) -> bool:
    return box.run("print(input())", "still here").stdout == "still here\n"


def values(listener: int, tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "of-the-run"
    file.write_text(SECRET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    numbers = (
        {"clone": 56, "keyctl": 250} if os.uname().machine == "x86_64" else {"clone": 220, "keyctl": 219}
    )
    return {"port": listener, "address": address, "pid": os.getpid(), "file": file, "other": 12345, **numbers}


OPEN_WITHOUT = {"a file of the run", "a file of Python", "a file beside the run"}
"Without namespaces: where the file's own rights are all that there is."


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_out_of_reach_is_an_error(name: str, sandbox: Sandbox, listener: int, tmp_path: Path) -> None:
    if sandbox.holds["missing"] and name in OPEN_WITHOUT:
        assert "NO namespaces" in sandbox.described and "programs can read" in sandbox.described
        return
    if sandbox.holds["missing"] and not sandbox.holds["own_user"] and "parent" in name:
        assert "signal its processes" in sandbox.described
        return
    outcome = sandbox.run(FAULTS[name].format(**values(listener, tmp_path)))
    assert ESCAPED not in outcome.stdout and SECRET not in outcome.stdout
    assert outcome.fault == "error" and "Error" in outcome.stderr
    assert still_serves(sandbox)


@pytest.mark.parametrize("name", DENIED)
def test_what_the_kernel_is_asked_for_is_denied(
    name: str, sandbox: Sandbox, listener: int, tmp_path: Path
) -> None:
    call = CALL + SAID.format(DENIED[name].format(**values(listener, tmp_path)))
    outcome = sandbox.run(call)
    assert outcome.fault == "" and outcome.stdout.strip() in ("1", "3", "12"), outcome  # EPERM, ESRCH, ENOMEM
    assert still_serves(sandbox)


@pytest.mark.parametrize("name", ENDED)
def test_what_takes_too_much_is_ended(name: str, sandbox: Sandbox) -> None:
    source, fault = ENDED[name]
    if sandbox.holds["missing"] and name == "disk":
        assert "of files each" in sandbox.described
        return
    outcome = sandbox.run(source, wall_s=0.5 if fault == "timeout" or fault is None else 3.0)
    assert fault is None or outcome.fault == fault, outcome
    assert outcome.fault and len(outcome.stdout) + len(outcome.stderr) <= LIMITS.output_bytes
    assert still_serves(sandbox)


def test_nothing_of_one_program_is_left_for_the_next(sandbox: Sandbox) -> None:
    """No process, no file, no state of the interpreter."""
    left = sandbox.run(
        "import os, sys, time\nopen('left', 'w')\nsys.left = 1\nprint(flush=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)"
    )
    assert left.fault == "" and left.seconds < 3.0
    after = sandbox.run("import os, sys\nprint(os.listdir('.'), hasattr(sys, 'left'), end='')")
    assert after.stdout == "[] False"
    [server] = sandbox._idle
    tree, seen = [server._process.pid], 0
    while tree:
        with open(f"/proc/{(pid := tree.pop())}/task/{pid}/children") as file:
            tree += map(int, file.read().split())
        seen += 1
    assert seen == (1 if sandbox.holds["missing"] else 3)


def test_what_fails_on_the_way_into_the_box_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec.learning.sandbox.sandbox._TREE", ("/usr", "/proc"))  # of which one is there
    box = Sandbox(LIMITS, max_concurrent=1)
    assert "NO namespaces (" in box.described and box.holds["missing"] and still_serves(box)
    box.close()


def test_an_idle_process_that_was_ended_is_replaced_and_none_outlives_its_sandbox() -> None:
    box = Sandbox(LIMITS, max_concurrent=1)
    first = box._idle[0]._process
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert still_serves(box) and box._idle[0]._process.pid != first.pid
    last = box._idle[0]._process
    del box
    assert last.poll() is not None
    assert Sandbox(LIMITS).run(argv=["/bin/sh", "-c", "echo $HOME"]).stdout.strip()


def test_a_tree_too_deep_to_walk_ends_nothing(sandbox: Sandbox) -> None:
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    assert sandbox.run(deep).fault == "" and still_serves(sandbox)


def test_a_program_gives_the_same_outcome_again(sandbox: Sandbox) -> None:
    source = "import random\nprint(random.random(), hash('a'), set('abcdef'))"
    assert sandbox.run(source).stdout == sandbox.run(source).stdout != ""


def test_a_program_sees_nothing_of_the_run(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its environment, not its open files, and no other program's input in the process's memory."""
    monkeypatch.setenv("RLHFSPEC_SECRET", SECRET)
    fresh = Sandbox(LIMITS, max_concurrent=1, namespaces=not sandbox.holds["missing"])
    fresh.run("print(input())", SECRET)
    looks = (
        "import gc, os\nprint(sorted(os.environ))\nfound = [text for one in gc.get_objects() if isinstance(one, dict)\n"
        "  for text in one.values() if isinstance(text, str) and text.startswith('a-sec' + 'ret')]\nprint(found)\n"
        "for at in range(3, 64):\n    try: os.fstat(at); print('open', at)\n    except OSError: pass"
    )
    said = fresh.run(looks).stdout.splitlines()
    fresh.close()
    assert "RLHFSPEC_SECRET" not in said[0] and "PATH" in said[0]
    assert said[1:] == ["[]"]
