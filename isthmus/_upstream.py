"""What Isthmus uses of torch and JAX that no release promises, and what is lost where a release changed it.

The modules named ``private.py`` hold every private name. Each is of one of two sorts:

- **needed**: without it there is no device (``create_empty_tensor``, dispatch keys, redispatch). Where it is missing,
  ``import isthmus`` raises a RegistrationError that names it, and ``import torch`` alone goes on without "jax".
- **optional**: a speed-up or a small feature. ``optional`` and ``choose`` try it; the first exception switches it off
  for the process, the slower or plainer way answers from then on, and ``isthmus doctor`` lists ``switched_off``.

    @optional("every call of a program takes a few microseconds more", otherwise=lambda compiled: compiled)
    def fast_call(compiled):
        return compiled._executable.create_cpp_call(compiled._params)

This module also knows which releases were checked (``make test-versions``), warns once above them, and says in one
sentence what keeps the device from working: Python, torch or JAX missing, broken or too old. ``import isthmus`` asks
``check_versions``, which imports nothing; what needs JAX calls ``require_jax`` first. Both raise a SetupError, and
``isthmus doctor`` prints the same sentence.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from isthmus.errors import RegistrationError, SetupError, VersionWarning, first_line

P = ParamSpec("P")
T = TypeVar("T")

OLDEST = {"torch": "2.11", "jax": "0.10"}
OLDEST_PYTHON = (3, 11)
_NAMES = {"torch": "torch", "jax": "JAX"}
NEWEST = {"torch": "2.15", "jax": "0.12"}
"""The newest releases that ``make test-versions`` was run with; docs/versions.md has the table."""

switched_off: dict[str, str] = {}
"""Optional uses of private names that this torch or JAX does not allow: by name, what is lost and why."""


def switch_off(name: str, consequence: str, error: Exception) -> None:
    """Note that an optional use failed; only its first failure is kept."""
    reason = f"{type(error).__name__}: {first_line(str(error))}"
    switched_off.setdefault(name, f"{consequence} ({reason})")


def optional(consequence: str, otherwise: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let ``otherwise`` answer for the decorated function once that has raised; ``consequence`` says what is lost.

    The function must not raise for any reason but a changed torch or JAX, and must change nothing before it may raise.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = f"{function.__module__.removeprefix('isthmus.')}.{function.__name__}"

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            # Not tried again: a name that is gone stays gone, and the failing try costs more than the other way.
            if name in switched_off:
                return otherwise(*args, **kwargs)  # type: ignore[no-any-return]
            try:
                return function(*args, **kwargs)
            except Exception as error:
                switch_off(name, consequence, error)
                return otherwise(*args, **kwargs)  # type: ignore[no-any-return]

        return call

    return decorate


def choose(name: str, consequence: str, preferred: Callable[[], T], otherwise: T) -> T:
    """Return ``preferred()``, which looks a name up and tries it, or ``otherwise`` where that raises.

    For names on the path of every op: the choice is made once, so that a call costs what it did before.
    """
    try:
        return preferred()
    except Exception as error:
        switch_off(name, consequence, error)
        return otherwise


DRIFT = (AttributeError, ImportError, TypeError)
"""What a private name that is missing or changed raises."""


def not_available(error: BaseException) -> RegistrationError:
    """Return the error that says there is no device with this torch and JAX, because of ``error``."""
    installed = " and ".join(f"{package} {installed_version(package)}" for package in NEWEST)
    checked = ", ".join(f"{package} {OLDEST[package]} to {NEWEST[package]}" for package in NEWEST)
    # The innermost line is the one that uses the private name, which is what a report of the fault needs.
    frames = traceback.extract_tb(error.__traceback__)
    line = f" at `{frames[-1].line}`" if frames and frames[-1].line else ""
    return RegistrationError(
        f"device 'jax' cannot be loaded with {installed}: {type(error).__name__}: {first_line(str(error))}{line}\n"
        f"  to fix it    install releases that were checked: {checked}"
    )


def check_versions() -> None:
    """Raise a SetupError if this Python, torch or JAX cannot serve the device; JAX is not imported to find out."""
    # In this order: pip on an old Python chooses an old torch, so its complaint would be a consequence of the first.
    fault = python_fault() or package_fault("torch") or package_fault("jax")
    if fault is not None:
        raise SetupError(fault)


def require_jax() -> None:
    """Import JAX; raise a SetupError if it is missing, broken or too old."""
    fault = jax_fault()
    if fault is not None:
        raise SetupError(fault[0]) from fault[1]


def jax_fault() -> tuple[str, Exception | None] | None:
    """Return the reason why JAX cannot be used, and the exception of its import, or None; imports it."""
    fault = package_fault("jax")
    if fault is not None:
        return fault, None
    try:
        with _numpy_random_state():
            version = importlib.import_module("jax").__version__
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(str(error))}"
        mend = "pip install --force-reinstall " + _requirement("jax")
        return f"JAX {installed_version('jax')} cannot be imported ({said}); to fix it: {mend}", error
    # The module is what counts: a folder called jax may come first on the path, without the metadata of a package.
    fault = _too_old("jax", version)
    return None if fault is None else (fault, None)


@contextmanager
def _numpy_random_state() -> Iterator[None]:
    """Leave numpy's global generator as it was: importing JAX draws from it (jax._src.clusters.k8s_cluster).

    The device imports JAX at its first tensor, in the middle of programs that have called ``np.random.seed``.
    """
    random = importlib.import_module("numpy").random
    state = random.get_state()
    try:
        yield
    finally:
        random.set_state(state)


def python_fault() -> str | None:
    """Return the fault of this Python, or None."""
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return None
    oldest = ".".join(map(str, OLDEST_PYTHON))
    version = ".".join(map(str, sys.version_info[:3]))
    return (
        f"Python {version} is older than {oldest}, the oldest that Isthmus works with; to fix it: "
        f"python{oldest} -m venv .venv && .venv/bin/pip install isthmus"
    )


def package_fault(package: str) -> str | None:
    """Return the fault of torch or JAX, or None; imports nothing."""
    # A parent package that fails to import, or a ``__spec__`` of None, raises here; both mean that it is not there.
    try:
        there = package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        needed = f"and Isthmus needs {OLDEST[package]} or newer"
        return f"{_NAMES[package]} is not installed, {needed}; to fix it: pip install {_requirement(package)}"
    version = installed_version(package)
    return None if version is None else _too_old(package, version)


def _too_old(package: str, version: str) -> str | None:
    oldest = OLDEST[package]
    if release(version) >= release(oldest):
        return None
    return (
        f"{_NAMES[package]} {version} is older than {oldest}, the oldest that Isthmus works with; to fix it: "
        f"pip install -U {_requirement(package)}"
    )


def _requirement(package: str) -> str:
    return f"'{package}>={OLDEST[package]}'"


def installed_version(package: str) -> str | None:
    """Return the version of a package: that of its module if it is imported, else what its metadata say, else None."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``(2, 13)`` for ``2.13.0+cpu``."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


@functools.cache
def unchecked() -> tuple[str, ...]:
    """Return the packages that are newer than any release Isthmus was checked with, such as ``torch 2.16.0``."""
    installed = {package: installed_version(package) for package in NEWEST}
    newer = [
        package
        for package, version in installed.items()
        if version is not None and release(version) > release(NEWEST[package])
    ]
    return tuple(f"{package} {installed[package]}" for package in newer)


@functools.cache
def warn_if_unchecked() -> None:
    """Warn, once in a process, about releases that are newer than those checked."""
    if unchecked():
        checked = " and ".join(f"{package} {version}" for package, version in NEWEST.items())
        warnings.warn(
            f"{' and '.join(unchecked())} is newer than what Isthmus was checked with ({checked}); "
            f"`isthmus doctor` lists what does not fit",
            VersionWarning,
            stacklevel=3,
        )
