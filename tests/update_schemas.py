"""Add the schemas that the installed torch has of every op with a lowering to isthmus/_ops/schemas.txt.

Run it after a lowering of another op was written, and with each new torch, once its lowerings were looked at.
"""

from __future__ import annotations

from isthmus._device.kernels import register  # noqa: F401  # files every lowering
from isthmus._graph.names import Missing, aten, prims
from isthmus._graph.schema import schema_of
from isthmus._ops.known_schemas import FILE, describe, form_of, known_forms
from isthmus._ops.registry import attempted


def main() -> None:
    """Write the file, old forms and new ones, sorted."""
    forms = {op: list(known) for op, known in known_forms().items()}
    added = 0
    for name in sorted(name for name in attempted if name.startswith(("aten.", "prims."))):
        space, packet, overload = name.split(".")
        op = getattr(getattr({"aten": aten, "prims": prims}[space], packet), overload)
        if isinstance(op, Missing):
            continue
        form = form_of(schema_of(op))
        if form not in forms.setdefault(name, []):
            forms[name].append(form)
            added += 1
    lines = [f"{op}{describe(form)}" for op in sorted(forms) for form in sorted(forms[op])]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{added} forms added to {FILE}")


if __name__ == "__main__":
    main()
