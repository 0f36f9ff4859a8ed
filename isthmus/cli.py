"""The command ``isthmus``: ``doctor`` (is the installation healthy), ``where`` and ``ops`` (which ops are covered, and
in which file), ``export`` and ``run`` (models as programs). Each command imports what it needs when it is chosen.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isthmus import _upstream

if TYPE_CHECKING:
    from isthmus.coverage import Answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 healthy or found, 1 not, 2 misused."""
    arguments = _parser().parse_args(argv)
    if arguments.run is not _doctor:  # it reports a missing JAX among the rest
        fault = _upstream.jax_fault()
        if fault is not None:
            print(f"isthmus: {fault[0]}", file=sys.stderr)
            return 1
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isthmus", description="PyTorch programs on every XLA device.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="versions, devices, the registry's health, a smoke run")
    doctor.set_defaults(run=_doctor)
    where = commands.add_parser("where", help="the file and line of an op's lowering")
    where.add_argument("op", metavar="OP", help="softmax, add_, aten.add.Tensor, mylib::myop, ...")
    where.set_defaults(run=_where)
    ops = commands.add_parser("ops", help="what is lowered, by family")
    ops.add_argument(
        "family", nargs="?", metavar="FAMILY", help="list one family, or 'cpu': what nothing lowers"
    )
    ops.set_defaults(run=_ops)
    _add_export(commands)
    _add_run(commands)
    return parser


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write a model as a program that needs no torch")
    export.add_argument("model", metavar="MODULE:ATTR", help="a model, or what returns one when it is called")
    export.add_argument(
        "--args",
        nargs="+",
        default=[],
        metavar="ARG",
        help="example inputs: f32[2,8], i64[batch=2,length=8..64] with dynamic sizes by name, or x.npy; "
        "NAME=ARG passes one by name",
    )
    export.add_argument("-o", "--output", required=True, metavar="PATH", help="a folder, or a file.isthmus")
    export.add_argument("--platforms", default="", metavar="LIST", help="such as cpu,cuda,tpu")
    export.add_argument("--precompile", action="store_true", help="add an executable for this device")
    export.set_defaults(run=_export)


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run an exported program on arrays")
    run.add_argument("path", metavar="PATH", help="what `isthmus export` wrote")
    run.add_argument(
        "--input", action="append", default=[], metavar="FILE", help="x.npy in order, or NAME=x.npy"
    )
    run.add_argument("-o", "--output", metavar="FILE", help="write the results to a file.npz")
    run.set_defaults(run=_run)


def _export(arguments: argparse.Namespace) -> int:
    from isthmus._export import command

    return command.export(
        arguments.model, arguments.args, arguments.output, arguments.platforms, arguments.precompile
    )


def _run(arguments: argparse.Namespace) -> int:
    from isthmus._export import command

    return command.run(arguments.path, arguments.input, arguments.output)


def _doctor(arguments: argparse.Namespace) -> int:
    from isthmus import doctor

    report = doctor.examine()
    print("\n".join(report.lines))
    if not report.problems:
        print("\nhealthy")
        return 0
    print(f"\n{len(report.problems)} problem(s):", file=sys.stderr)
    for problem in report.problems:
        print(f"  {problem}", file=sys.stderr)
    return 1


def _where(arguments: argparse.Namespace) -> int:
    from isthmus import coverage

    answers = [coverage.answer(op) for op in coverage.overloads(arguments.op)]
    if not answers:
        name = arguments.op.replace("::", ".").removeprefix("aten.").split(".")[0]
        close = difflib.get_close_matches(name, coverage.packet_names("aten"), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "names are torch's: softmax, add.Tensor"
        print(f"isthmus: torch has no op {arguments.op!r}; {hint}", file=sys.stderr)
        return 1
    width = max(len(str(each.op)) for each in answers)
    # Ops with a line to open come first: the question was where the code is.
    for each in sorted(answers, key=lambda each: each.place is None):
        print(f"{each.op!s:{width}}  {_explain(each)}")
    return 0


def _explain(answer: Answer) -> str:
    from isthmus import coverage

    if answer.tier == coverage.LOWERED:
        derived = f"  derived from {answer.through}" if answer.through is not answer.op else ""
        return f"{answer.place}{derived}"
    return {
        coverage.DEVICE: f"{answer.place}  the device's own kernel",
        coverage.VIEW: "a view: torch's own, read and written by its strides (isthmus/_device/core/strided.py)",
        coverage.COMPOSITE: "composite: torch takes it apart into other ops",
        coverage.DECOMPOSED: "decomposed: torch's own decomposition, traced into one program",
        coverage.CPU: "CPU: nothing lowers it; docs/add-a-lowering.md says how to",
    }[answer.tier]


def _ops(arguments: argparse.Namespace) -> int:
    from isthmus import coverage

    families = coverage.families()
    if arguments.family is not None:
        listed = families.get(arguments.family)
        if arguments.family == coverage.CPU:
            listed = coverage.tiers().get(coverage.CPU, [])
        if listed is None:
            known = ", ".join([*families, coverage.CPU])
            print(f"isthmus: there is no family {arguments.family!r}; there are {known}", file=sys.stderr)
            return 1
        print("\n".join(str(op) for op in listed))
        return 0
    for family, lowered in families.items():
        print(f"{family:16} {len(lowered):5}  {_abridged([str(op).removeprefix('aten.') for op in lowered])}")
    tiers = coverage.tiers()
    total = sum(len(ops) for ops in tiers.values())
    print(f"\nof the {total} functional ATen overloads of this torch")
    for tier in coverage.TIERS:
        print(f"  {tier:12} {len(tiers.get(tier, [])):5}")
    return 0


def _abridged(names: list[str], width: int = 80) -> str:
    text = ", ".join(names)
    return text if len(text) <= width else text[:width].rsplit(", ", 1)[0] + ", ..."


if __name__ == "__main__":
    sys.exit(main())
