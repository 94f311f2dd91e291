"""Cells in a real kernel, and Ctrl-C in the middle of one: prints a JSON object for each cell, see `main`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

IDLE_S = 300.0


def run_cell(client: Any, manager: Any, code: str, stop_at: str | None) -> dict[str, Any]:
    """What a cell printed, displayed and raised; the kernel is interrupted once when it has printed `stop_at`."""
    asked = client.execute(code)
    printed, shown, error = "", [], None
    while True:
        message = client.get_iopub_msg(timeout=IDLE_S)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            printed += content["text"]
            if stop_at is not None and stop_at in printed:
                stop_at = None
                manager.interrupt_kernel()
        elif kind in ("display_data", "execute_result"):
            shown.append(content["data"])
        elif kind == "error":
            error = f"{content['ename']}: {content['evalue']}"
        elif kind == "status" and content["execution_state"] == "idle":
            return {"printed": printed, "shown": shown, "error": error}


def main(cells: list[tuple[str, str | None]]) -> None:
    """Run them in one kernel."""
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(Path.cwd()))
    try:
        for code, stop_at in cells:
            began_s = time.monotonic()
            print(
                json.dumps(run_cell(client, manager, code, stop_at) | {"s": time.monotonic() - began_s}),
                flush=True,
            )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
