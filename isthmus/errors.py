"""The errors Isthmus raises of its own; a mistake torch also rejects raises torch's exception.

Each class derives from ``IsthmusError`` and, where torch or Python has a class for the mistake, from that as well.

>>> import isthmus
>>> issubclass(isthmus.errors.ConfigError, (isthmus.errors.IsthmusError, ValueError))
True
"""

from __future__ import annotations


class IsthmusError(RuntimeError):
    """Anything Isthmus itself refuses to do."""


class MissingLowering(IsthmusError, NotImplementedError):
    """An op has no lowering and may not fall back to the CPU."""


class Unsupported(IsthmusError):
    """Raised inside a lowering: these arguments are not for it, let the next tier answer."""


class LoweringError(IsthmusError):
    """A lowering failed, or disagreed with torch about the shape or dtype of its result."""


class RegistrationError(IsthmusError):
    """The device was registered too late, or something else already took its place."""


class SetupError(RegistrationError, ImportError):
    """Python, torch or JAX is missing, broken or too old for the device."""


class SchemaError(IsthmusError, TypeError):
    """A lowering does not fit the schema of the op it was registered for."""


class ConfigError(IsthmusError, ValueError):
    """A setting was given a value it does not have."""


class JitError(IsthmusError):
    """A function given to ``isthmus.jit`` does something that cannot be replayed without running its Python."""


class ExportError(IsthmusError):
    """A model cannot be exported, or a file is no exported program."""


class CollectiveError(IsthmusError):
    """A collective of ``torch.distributed`` failed: ranks called different ones, or one of them is gone."""


class DamagedFile(IsthmusError, ValueError):
    """A file is not as it was written: ``file`` is its path, ``part`` what is wrong in it."""

    def __init__(self, file: object, part: str, reason: str, remedy: str) -> None:
        super().__init__(
            f"{file} is damaged: {part} is not what was written\n  because      {reason}\n  to go on     {remedy}"
        )
        self.file, self.part = str(file), part


class TracedValueError(IsthmusError):
    """Torch code that runs inside a transformation of JAX's reads a value, which is not known yet."""


class VersionWarning(UserWarning):
    """The installed torch or JAX is newer than any release that Isthmus was checked with."""


class ConfigWarning(UserWarning):
    """An environment variable of Isthmus's has a value or a name that it does not know."""


def first_line(text: str) -> str:
    """Return the first line of an error's text, without blanks around it: XLA's errors go on with whole programs."""
    return (text.strip().splitlines() or [""])[0]
