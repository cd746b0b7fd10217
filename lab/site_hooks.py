"""Hooks of mkdocs: pages beside ``docs/``, links as the repository has them, buttons at home, roles in docstrings.

In the repository ``docs/limits.md`` links to ``../examples/cli.py`` and the README to ``docs/limits.md``. On the site
the README is the first page, and the files of the examples lie beside the pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Files of the repository, outside ``docs/``, and what they are called on the site.
PUBLISHED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "LICENSE": "LICENSE.txt"}
#: Kinds of files of ``examples/`` that are published under their own names.
KINDS = (".py", ".yaml", ".sbatch", ".md", ".ipynb")
#: Buttons below the first paragraph of the home page.
BUTTONS = (
    "[Quickstart](docs/quickstart.md){ .md-button .md-button--primary } "
    "[Will it help?](docs/will_it_help.md){ .md-button .md-button--primary }"
)
_DOCS = "docs/"
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(
    r":(?:class|func|meth|data|attr|mod):<code>(?:([^<&]+?)\s+&lt;[^<]*&gt;|~?(?:[\w.]*\.)?(\w+(?:\(\))?))</code>"
)


def published() -> dict[str, str]:
    """Paths in the repository of all files outside ``docs/`` that the site has, with their names there."""
    examples = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in KINDS)
    return PUBLISHED | {name: name for name in (path.relative_to(ROOT).as_posix() for path in examples)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies beside ``docs/``."""
    from mkdocs.structure.files import File

    for path, uri in published().items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site, and adds the buttons of the home page."""
    if page.file.src_uri == "index.md":
        title, first, rest = markdown.split("\n\n", 2)
        markdown = "\n\n".join((title, first, BUTTONS, rest))
    parts = _FENCED.split(markdown)
    parts[::2] = [moved(text, page.file.src_uri) for text in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes names in docstrings (``:class:`~package.Name```) as names."""
    return _ROLE.sub(lambda match: f"<code>{match[1] or match[2]}</code>", html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes the mark off the repository's link by which the theme would fetch stars and forks from its host."""
    return output.replace('data-md-component="source"', "")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same on pages that are no documents."""
    return output_content.replace('data-md-component="source"', "")


def moved(text: str, uri: str) -> str:
    """Text of a page with links as the site has them.

    Args:
        text: Without fenced blocks.
        uri: Of the page on the site.
    """
    names = published()
    source = next((path for path, name in names.items() if name == uri), _DOCS + uri)

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (ROOT / path).is_dir():
            path = f"{path}/README.md"
            if path not in names:
                return label  # a folder without a page
        if path not in names and not path.startswith(_DOCS):
            return match[0]  # mkdocs says so
        there = names.get(path, path.removeprefix(_DOCS))
        return f"[{label}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(link, text)
