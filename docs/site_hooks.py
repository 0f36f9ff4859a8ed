"""What the site needs beyond the files in docs/: hooks of mkdocs, named in mkdocs.yml.

Pages are written for the repository: README.md links to ``docs/compile.md``, a page in docs/ to
``../ARCHITECTURE.md`` or ``../isthmus/modes.py``. Here the documents outside of docs/ become pages, every link leads
to the place of its target on the site. A link to a file that is no page leads to the repository if ``REPO_URL`` in the
environment names it; else only its text stays. The page of the API is written here as well, since its directives say
nothing to a reader of the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "tests.md",
}
"""Documents outside of docs/, and the pages they become."""

API = {
    "Modes": ["lazy", "sync", "jit", "mode", "set_mode", "graph_of"],
    "Looking inside": ["explain", "profile", "metrics", "clear_caches"],
    "JAX in torch": ["from_jax", "to_jax", "jax_function", "custom_op", "jax_module", "optax"],
    "Torch in JAX": ["functional", "torch_function", "train_step", "generate"],
    "Files": ["export", "load", "checkpoint"],
    "Many devices": ["distributed"],
    "Extending": ["lowering", "register_backend", "register"],
    "Settings and errors": ["config", "errors"],
    "Libraries": ["integrations"],
}
"""The public names, in the order of the page."""

MEMBERS = {"config": "false", "optax": "[Optimizer]"}
"""Which names of a module the page shows, where not all: the settings themselves have a page."""

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
ALERT = re.compile(r"^> \[!(\w+)\]\n((?:^>.*\n?)+)", re.MULTILINE)


def api() -> str:
    """Return the page of the public names, each by a directive of mkdocstrings."""
    lines = [
        "# API",
        "",
        "A name without an underscore is public. Names of torch (`torch.compile`, `torch.jax`) are torch's or have "
        "torch's meaning. [Settings](settings.md) has the values of `isthmus.config`.",
    ]
    for title, names in API.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: isthmus.{name}", "    options:", "      heading_level: 3"]
            if name in MEMBERS:
                lines += [f"      members: {MEMBERS[name]}"]
    return "\n".join(lines) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links and alerts as GitHub has them into those of the site."""
    own = page.file.src_uri
    source = next((path for path, name in OUTSIDE.items() if name == own), f"docs/{own}")

    def turned(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        path, _, anchor = link.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = OUTSIDE.get(target, target.removeprefix("docs/"))
        if (target in OUTSIDE or target.startswith("docs/")) and files.get_file_from_path(place) is not None:
            there = posixpath.relpath(place, posixpath.dirname(own) or ".")
            return f"{image}[{text}]({there}{'#' * bool(anchor)}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # mkdocs says that it leads nowhere
        return f"[{text}]({config.repo_url}/blob/main/{target})" if config.repo_url else text

    parts = FENCE.split(markdown)
    parts[::2] = [ALERT.sub(_admonition, LINK.sub(turned, part)) for part in parts[::2]]
    return "".join(parts)


def _admonition(match: re.Match[str]) -> str:
    body = "\n".join("    " + line.removeprefix(">").strip() for line in match[2].splitlines())
    return f"!!! {match[1].lower()}\n\n{body}\n"
