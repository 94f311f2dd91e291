"""Workers of Ray as forks of one process that has imported torch, transformers and peft.

An actor is a process of its own, and most of what its start costs is importing these. While Ray starts, a small
program stands in for the interpreter: it sends a worker's command to the process that this file is, which forks and
runs it with the files, the environment and the folder that came with it. Every other command it runs itself.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import active_count

_ROOM = 1 << 17
"Bytes of a command with its environment."
_IMPORTED = ("torch", "transformers.models.llama.modeling_llama", "peft")
"Neither Ray, which reads the environment when it is imported, nor anything of ours."
_STAND_IN = """#!{python} -SE
import json, os, socket, sys
if not sys.argv[1].endswith("/default_worker.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
    worker.connect({address!r})
    command = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(worker, [command], [0, 1, 2])
    # until it ends
    worker.recv(1)
"""


@contextmanager
def warm_workers(folder: Path) -> Iterator[str]:
    """The interpreter that a Ray must be started with for its workers to be forked; keeps two files in `folder`."""
    address, interpreter = str(folder / "warm.sock"), folder / "warm_python"
    interpreter.write_text(_STAND_IN.format(python=sys.executable, address=address))
    interpreter.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as commands:
        commands.bind(address)
        commands.listen(64)
        argv, file = [sys.executable, __file__, str(commands.fileno())], commands.fileno()
        # until its standard input ends, as it does with this process
        forking = subprocess.Popen(argv, pass_fds=[file], stdin=subprocess.PIPE, start_new_session=True)
    with forking:
        yield str(interpreter)


def _next_worker(commands: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for every command until standard input ends; return in the child, with its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([commands, sys.stdin], [], [])[0]:
        worker, _ = commands.accept()
        command, files, *_ = socket.recv_fds(worker, _ROOM, 3)
        if os.fork():
            for file in (*files, worker.detach()):
                os.close(file)
            continue
        commands.close()
        # Ray ends a worker with its process group
        os.setsid()
        # open until this process ends
        worker.detach()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return json.loads(command)
    sys.exit()


if __name__ == "__main__":
    for name in _IMPORTED:
        import_module(name)
    assert active_count() == 1, "a fork has one thread"
    argv, environment, folder = _next_worker(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")
