"""Build the package, check it and try the wheel as a user would; run by ``make release``.

1. ``build`` makes the sdist and the wheel in ``dist/``, ``twine check --strict`` reads their metadata;
2. the wheel must hold what the package needs beside its code: the two modules that entry points name, ``py.typed``,
   the schemas; and nothing of the tests;
3. the wheel is installed into an environment of its own, with the torch that ``make venv`` takes (``RELEASE_TORCH``
   names another requirement) and JAX as pip finds it, and a model is trained there on the device.

Each command says how long it took, and has a limit. Nothing is compiled to bytecode while it is installed: torch alone
has thousands of files, of which this environment imports a part, once. Uses nothing but the standard library, so that
any Python can start it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
NEEDED = ("_isthmus_autoload.py", "_isthmus_command.py", "isthmus/py.typed", "isthmus/_ops/schemas.txt")
TRY = """
import torch
model = torch.nn.Linear(4, 1).to("jax")
x = torch.randn(16, 4, device="jax")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
assert torch.compile(model, backend="isthmus")(x).shape == (16, 1)
print("trained on", x.device)
"""


def run(*command: str | Path, limit: float = 600) -> None:
    """Run a command where the sources are not in the way; stop if it fails, or takes over ``limit`` seconds."""
    print("$", *command, flush=True)
    began = time.monotonic()
    try:
        subprocess.run([str(part) for part in command], check=True, cwd=tempfile.gettempdir(), timeout=limit)
    except subprocess.CalledProcessError as failed:
        sys.exit(f"that command ended with status {failed.returncode}")
    except subprocess.TimeoutExpired:
        sys.exit(f"that command took over {limit:.0f} s")
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def install(python: Path, *packages: str | Path, limit: float = 600) -> None:
    """Install packages into an environment."""
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", *packages, limit=limit)


def environment(folder: Path) -> Path:
    """Make a virtual environment and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def check_contents(wheel: Path) -> None:
    """Stop unless the wheel has the files that are easily left out, and no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    extra = [name for name in names if name.startswith("tests/")]
    if missing or extra:
        sys.exit(f"{wheel.name} lacks {missing} and should not have {extra}")


def main() -> None:
    """Build, check, install, try."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tools = environment(Path(folder) / "tools")
        install(tools, "build", "twine")
        run(tools, "-m", "build", "--outdir", DIST, ROOT)
        run(tools, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
        (wheel,) = DIST.glob("*.whl")
        check_contents(wheel)
        user = environment(Path(folder) / "user")
        # torch by itself and by name first, so that no later requirement can bring another build of it.
        install(user, os.environ.get("RELEASE_TORCH", "torch==2.13.0"), limit=1800)
        install(user, wheel, limit=1200)
        run(user, "-c", TRY)
        run(user.parent / "isthmus", "doctor")
    print("ready to publish:", *sorted(path.name for path in DIST.iterdir()))


if __name__ == "__main__":
    main()
