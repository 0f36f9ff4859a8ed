"""An extension of griffe, which reads the docstrings for the site: it knows "Examples:", and ours say "Example:"."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Have examples shown as code; as plain text, brackets in their results would be links."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section of one docstring, as it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
