"""Settings as dataclass fields: one way to declare them, to check a value, to word a refusal, to print the table.

Two frozen dataclasses are made of such fields: ``isthmus.config.Settings`` (the process, with environment variables)
and ``isthmus._dynamo.options.Options`` (one ``torch.compile`` call). Both use the functions here, so a wrong value is
refused in the same words in both places, and docs/settings.md prints both (docs/make_settings.py)::

    donate: str = setting("auto", "Whether ...", choices=("auto", "off"), variable="ISTHMUS_DONATE")
    workers: int = setting(8, "How many ...")           # no choices: a positive integer
    folder: str = setting("", "A folder ...", kind="a path")

    isthmus.config.donate = 'of' is not a choice; choose from 'auto', 'off'
    options["programs"] = 0 is not a positive integer

The default of a field says what type its values have; choices, where there are any, say which values are legal.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import Field, field, fields
from typing import Any

from isthmus.errors import ConfigError

_TYPES = {int: "a positive integer", str: "a string", dict: "a dictionary"}


def setting(
    default: Any, doc: str, *, choices: tuple[Any, ...] = (), variable: str = "", kind: str = ""
) -> Any:
    """Return a dataclass field.

    Arguments:
        default: its value unless another is given; a dict is copied for each object.
        doc: one sentence, printed in docs/settings.md.
        choices: the legal values; empty where any value of the default's type is legal.
        variable: the environment variable that sets it, if one does.
        kind: what a value is, in words ("a path"), where the type alone says too little.
    """
    metadata = {"choices": choices, "doc": doc, "variable": variable, "kind": kind, "default": default}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def fault(about: Field[Any], value: Any) -> str | None:
    """Return the fault of a value, as the end of a sentence that starts with the value; None where it is legal."""
    choices, default = about.metadata["choices"], about.metadata["default"]
    if choices:
        # By type as well: 1 == True, and an array compared with a string is no bool.
        if any([isinstance(value, type(choice)) and value == choice for choice in choices]):
            return None
        return f"is not a choice; choose from {', '.join(map(repr, choices))}"
    # True is an int, and would pass for 1.
    if (
        not isinstance(value, type(default))
        or isinstance(value, bool)
        or (isinstance(value, int) and value < 1)
    ):
        return f"is not {_TYPES[type(default)]}"
    return None


def legal(about: Field[Any]) -> str:
    """Return the legal values of a setting in words."""
    choices = about.metadata["choices"]
    if choices:
        return " or ".join(map(repr, choices))
    return str(about.metadata["kind"] or _TYPES[type(about.metadata["default"])])


def check(owner: type, name: str, value: Any, *, unknown: str, assigned: str) -> None:
    """Raise ConfigError unless ``owner`` has a setting of that name and the value is legal.

    Arguments:
        owner: the dataclass.
        unknown: how the refusal of a name begins: ``isthmus.config has no setting``.
        assigned: how a value is assigned to this setting: ``isthmus.config.donate``.
    """
    known = {each.name: each for each in fields(owner)}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? It" if close else "it"
        raise ConfigError(f"{unknown} {name!r}; {hint} has {', '.join(known)}")
    wrong = fault(known[name], value)
    if wrong is not None:
        raise ConfigError(f"{assigned} = {value!r} {wrong}")


def table(owner: type) -> str:
    """Return every setting of a dataclass as a Markdown table; the variables are a column where there are any."""
    rows = [_row(each) for each in fields(owner)]
    heads = ["name", "environment variable", "values", "default", "meaning"]
    if not any(row[1] for row in rows):
        rows, heads = [[row[0], *row[2:]] for row in rows], [heads[0], *heads[2:]]
    return "\n".join([_line(heads), _line(["---"] * len(heads)), *map(_line, rows)])


def _row(about: Field[Any]) -> list[str]:
    choices, default = about.metadata["choices"], about.metadata["default"]
    return [
        f"`{about.name}`",
        f"`{about.metadata['variable']}`" if about.metadata["variable"] else "",
        ", ".join(f"`{choice}`" for choice in choices) if choices else legal(about),
        f"`{default}`" if default != "" else "empty",
        about.metadata["doc"],
    ]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
