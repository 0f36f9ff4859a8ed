"""The command ``isthmus``, outside the package: where that cannot be imported, a line says why."""

from __future__ import annotations

import sys
import warnings


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        with warnings.catch_warnings():
            # What ``import torch`` warns about is the error that comes next.
            warnings.filterwarnings("ignore", message="device 'jax' is not available")
            from isthmus import cli
    except Exception as error:
        print(f"isthmus: {error}", file=sys.stderr)
        return 1
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
