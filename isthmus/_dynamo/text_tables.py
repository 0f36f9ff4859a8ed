"""Numbers and tables for a person to read in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as aligned lines, titles first."""
    if not rows:
        return []
    every = [titles, *rows] if titles else rows
    widths = [max(len(cell) for cell in column) for column in zip(*every, strict=True)]
    to_right = set(right)
    return [
        "  ".join(
            cell.rjust(width) if at in to_right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in every
    ]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 graph``, ``2 graphs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(value: float | None, unit: str) -> str:
    """Return a number with its unit, as ``1.25 MB``; a dash where it is not known."""
    if value is None:
        return "-"
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = 0 if prefix == "" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Return a time in milliseconds or seconds."""
    return f"{seconds:.2f} s" if seconds >= 0.99995 else f"{1000 * seconds:.1f} ms"
