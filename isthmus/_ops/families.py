"""Importing this module files every lowering: each module in this folder is a family or a helper."""

import importlib
import pkgutil

import isthmus._ops

for _module in sorted(m.name for m in pkgutil.iter_modules(isthmus._ops.__path__)):
    if _module != "families":
        importlib.import_module(f"isthmus._ops.{_module}")
