"""Workers of a private Ray as forks of one process that has imported what every actor imports.

An actor is a process of its own, and most of its start is imports. Ray is given a command for its workers
(`py_executable` of a runtime environment): this file, which sends its words, its environment and its files to a process
that was started with the run, and that one forks. Where it is gone the worker starts as Ray would start it.

Run by its path with the standard library alone (`-SE`), as every worker passes through it.
"""

import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from subprocess import Popen

_ROOM = 1 << 17
"Bytes of a command with its environment."
_IMPORTED = (
    "numpy",
    "torch",
    "transformers.models.llama.modeling_llama",
    "rlhfspec.engine.build",
    "rlhfspec.learning.drafts.cotraining",
    "rlhfspec.learning.drafts.refit",
    "rlhfspec.learning.environments.tools",
    "rlhfspec.learning.rewards.reward_function",
    "rlhfspec.learning.training.learner",
)
"Not Ray, which reads the environment when it is imported, and nothing that imports it."


_NAME = f"rlhfspec-workers-{os.urandom(12).hex()}"
"Of a socket without a file: nothing is left of it."


class _Forking:
    """The process that forks, kept as long as this one lives."""

    process: "Popen[bytes] | None" = None


def worker_environment() -> dict[str, str]:
    """Workers import this tree. Not the caller's folder: it would go before the standard library (`code.py`)."""
    from .origin import IS_CHECKOUT, ROOT

    inherited = os.environ.get("PYTHONPATH", "")
    tree = [str(ROOT)] if IS_CHECKOUT else []
    folders = dict.fromkeys([*tree, *filter(None, inherited.split(os.pathsep))])
    return {"PYTHONPATH": os.pathsep.join(folders)}


def worker_command() -> str:
    """What Ray is to start workers with (`py_executable`): forks once `begin_forking` was called, alone before."""
    from shlex import join

    return join([sys.executable, "-SE", __file__, _NAME])


def begin_forking() -> None:
    """Start the process that forks, where it does not run; it imports for some seconds, and workers wait for it."""
    from subprocess import DEVNULL, PIPE, Popen

    from ...core.named_code import IMPORT_FOLDER
    from .quiet import quiet_environment

    if _Forking.process is not None and _Forking.process.poll() is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as commands:
        commands.bind(f"\0{_NAME}")
        commands.listen(64)
        _Forking.process = Popen(
            [sys.executable, "-m", __name__, str(commands.fileno())],
            cwd=IMPORT_FOLDER,
            # neither numpy nor torch may have threads when it forks
            env=os.environ | quiet_environment() | worker_environment() | {"OMP_NUM_THREADS": "1"},
            pass_fds=[commands.fileno()],
            # until this process ends
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,
        )


def _hand_over(name: str, command: list[str]) -> None:
    """Let the process that forks run a worker, and last as long as the worker does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        try:
            worker.connect(f"\0{name}")
        except OSError:
            os.execv(sys.executable, [sys.executable, *command])
        socket.send_fds(worker, [json.dumps([command, dict(os.environ), os.getcwd()]).encode()], [0, 1, 2])
        worker.recv(1)


def _next_worker(commands: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for every command until standard input ends; return in the child, with its own."""
    import select
    import struct

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([commands, sys.stdin], [], [])[0]:
        worker, _ = commands.accept()
        _, user, _ = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            worker.close()
            continue
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


def _fork() -> None:
    """Import, fork when told to, and be the worker in the child."""
    import gc
    import runpy
    from importlib import import_module

    numpy, torch, *_ = [import_module(module) for module in _IMPORTED]
    gc.collect()
    gc.freeze()
    sys.argv, environment, folder = _next_worker(socket.socket(fileno=int(sys.argv[1])))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # numpy draws its seed, torch reads its threads, when it is imported
    numpy.random.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if __package__:
        _fork()
    else:
        _hand_over(sys.argv[1], sys.argv[2:])
