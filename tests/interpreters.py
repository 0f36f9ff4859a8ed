"""Code run in a process of its own: by a new interpreter, or by a fork of one that has imported everything.

A new interpreter imports torch, JAX and the package before its first line, about five seconds of CPU time. Most tests
that need a process need it for what their code leaves behind (settings, registered ops, a crash), not for the imports.
``forked`` gives them a child of a server that has imported all of it and computed nothing: JAX has no backend and no
threads yet, so the child starts its own, as a new interpreter does (``isthmus/_runtime/forks.py`` allows just that).
``forked_early`` gives them a child of a server that has imported torch alone, for what must be the first thing that a
process does with the device.

``fresh`` starts a new interpreter. It is for tests of importing: what is loaded when, which variables of the
environment are read, in which order modules come, and what happens at exit (a forked child runs no exit handlers).

Both return a ``subprocess.CompletedProcess``: a negative status is the signal that ended the child.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Ran = subprocess.CompletedProcess[str]


def fresh(code: str, *arguments: str, timeout: float = 240, **environment: str) -> Ran:
    """Run code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def forked(code: str, *arguments: str, timeout: float = 240, **environment: str) -> Ran:
    """Run code in a fork of an interpreter that has imported torch, JAX and the package.

    Of ``environment`` the package's own variables and XLA_FLAGS are read again; others that are read while modules are
    imported have no effect.
    """
    return _server("everything").run(textwrap.dedent(code), list(arguments), timeout, environment)


def forked_early(code: str, *arguments: str, timeout: float = 240, **environment: str) -> Ran:
    """Run code in a fork of an interpreter that has imported torch, which knows the device; JAX is not loaded."""
    return _server("torch").run(textwrap.dedent(code), list(arguments), timeout, environment)


@functools.cache
def _server(imports: str) -> Server:
    return Server(imports)


class Server:
    """The process that forks; there is one per process that runs tests, and it ends with that."""

    def __init__(self, imports: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreters", imports],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, arguments: list[str], timeout: float, environment: dict[str, str]) -> Ran:
        """Send a job, wait for its end, and return its status and what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            job = {"code": code, "arguments": arguments, "environment": environment}
            job |= {"outputs": [*map(str, outputs)], "timeout": timeout}
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            status = json.loads(self.process.stdout.readline())
            out, err = (path.read_text(errors="replace") for path in outputs)
        if status is None:
            raise subprocess.TimeoutExpired(code, timeout, out, err)
        return subprocess.CompletedProcess(code, status, out, err)


def _import_everything() -> None:
    import torch._dynamo  # noqa: F401

    import isthmus._dynamo.backend
    import isthmus._export.container
    import isthmus._interop.functional  # noqa: F401
    from isthmus._device.torch_glue import registration

    registration.load()


def _serve(imports: str) -> None:
    """Fork a child for each line of standard input; print its exit status, or null where it took too long."""
    # torch first: it registers the device while it is imported. Registered later, the device would try a backward pass
    # to see whether autograd knows it, and autograd refuses to run in forks of a process that ran one.
    import torch  # noqa: F401

    if imports == "everything":
        _import_everything()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(job)
        print(json.dumps(_wait(child, job["timeout"])), flush=True)


def _wait(child: int, timeout: float) -> int | None:
    """Return a child's exit status, or end it and return None where it runs for longer than that."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def _child(job: dict[str, Any]) -> None:
    """Run a job in this process and end it; the handlers of ``atexit`` belong to the server and are not run."""
    status = 1
    try:
        for number, path in enumerate(job["outputs"], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        if job["environment"]:
            _read_settings()
        sys.argv = ["-c", *job["arguments"]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(job["code"], "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read_settings() -> None:
    """Read the environment again, as importing the package does."""
    import dataclasses

    from isthmus import config

    for name, value in dataclasses.asdict(config.from_environment()).items():
        if getattr(config, name) != value:
            setattr(config, name, value)


if __name__ == "__main__":
    _serve(sys.argv[1])
