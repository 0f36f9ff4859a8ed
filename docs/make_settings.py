"""Write docs/settings.md from the settings and the options of torch.compile: ``make docs``."""

from __future__ import annotations

from pathlib import Path

from isthmus import _settings, config
from isthmus._dynamo.options import Options

OUTPUT = Path(__file__).parent / "settings.md"

HEAD = """\
# Settings

Written by `make docs` from `isthmus/config.py` and `isthmus/_dynamo/options.py`.

## Of the process

A setting is an attribute of `isthmus.config`, read and assigned by name; an assignment holds from then on, in every
thread (`mode` alone belongs to the thread that assigns it). Its environment variable is read once, when `isthmus` is
imported, which `import torch` does where it adds the device by itself.

```python
import isthmus

isthmus.config.fallback = "error"
print(isthmus.config.graph_size)  # 5000
```
"""

VARIABLES = f"""\
One variable is no setting, since it is read before Isthmus is imported: `{config.AUTOLOAD}`. With `1`, `import torch`
adds the device also where torch has an accelerator of its own; with `0` only `import isthmus` adds it.

A variable with a value that is not legal is warned about and left out, and so is a variable that begins with `ISTHMUS_`
and is none of these; an empty one counts as not set. Assigning a value that is not legal raises
`isthmus.errors.ConfigError`.

## Of one `torch.compile` call

`torch.compile(f, backend="isthmus", options={{...}})`; [compile.md](compile.md) says when to use which. An option with
another name or value raises `isthmus.errors.ConfigError`.
"""

MODE = """\
`torch.compile(mode=...)` has one value here, `"default"`; the others ask TorchInductor for tuned kernels and CUDA
graphs, which XLA decides by itself, and raise.
"""


def text() -> str:
    """Return the page."""
    parts = [
        HEAD,
        _settings.table(config.Settings) + "\n",
        VARIABLES,
        _settings.table(Options) + "\n",
        MODE,
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
