"""The site is built strictly (links and anchors lead somewhere), is complete, and fetches nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_safusion
from lab.site_hooks import moved
from lightning_safusion import metrics, plugins, testing
from tests.documents.pages import ROOT
from tests.e2e.browser import browser

HOME = "https://github.com/somebody/safusion"


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=source,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "SAFUSION_URL": HOME},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ended = build(ROOT, folder)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return folder


@pytest.mark.slow
def test_public_names_are_in_the_api(site: Path) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    documented = set(re.findall(r'id="lightning_safusion\.(?:metrics\.|plugins\.|testing\.)?(\w+)"', text))
    public = {name for module in (lightning_safusion, metrics, plugins, testing) for name in module.__all__}
    assert public - {"__version__"} <= documented
    assert not re.search(r":(class|func|meth|data|attr):", text)  # roles of docstrings are names on a page


@pytest.mark.slow
def test_lists_and_tables_are_no_text(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.search(r"<p>(?:(?!</p>).)*\n(?:- |\d+\. |\|)[^\n]*", page.read_text(encoding="utf-8"), re.DOTALL)
        assert not found, f"{page.name}: a blank line is missing before {found[0][-60:]}"


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        elements = r'<(?:script|img|iframe)[^>]* src="(https?://[^"]+)|<link[^>]* href="(https?://[^"]+)'
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(elements, text)
        assert not fetched, f"{page.name}: {fetched}"
        assert 'data-md-component="source"' not in text  # by which the theme asks the repository's host for its stars


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_fit_and_have_their_pictures(site: Path, tmp_path: Path, width: int, scheme: str) -> None:
    pictures = "[...document.querySelectorAll('.md-content img')].map(each => [each.src, each.naturalWidth])"
    with browser(tmp_path) as window:
        for page in sorted({*site.rglob("*.html")} - {site / "404.html"}):  # which a server shows
            window.show(page, width, 900, scheme)
            assert window.ask("document.documentElement.scrollWidth") == width, page
            assert [source for source, size in window.ask(pictures) if size == 0] == [], page
            assert window.console() == [], page


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_can_be_searched_that_were_opened_as_files(site: Path, tmp_path: Path, width: int) -> None:
    with browser(tmp_path) as window:
        window.show(site / "index.html", width, 900, "light")
        window.type("[data-md-component=search-query]", "break-even bandwidth")
        found = window.until("document.querySelector('.md-search-result__link')?.href")
        assert found == (site / "will_it_help.html").resolve().as_uri()
        assert [each for each in window.requests() if not each.startswith(("file:", "data:"))] == []
        assert window.console() == []


@pytest.mark.slow
def test_what_lies_beside_the_documents_is_on_the_site(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="will_it_help.html' in home
    assert 'src="images/steps.svg"' in home
    assert '<a class="md-button md-button--primary" href="quickstart.html">' in home
    assert 'href="examples/ddp_script.py"' in home
    assert f'<a href="{HOME}"' in home
    assert (site / "examples" / "ddp_script.py").read_text() == (ROOT / "examples" / "ddp_script.py").read_text()
    assert "Unreleased" in (site / "changelog.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("index.md", "[a](docs/guide/yaml.md#x)", "[a](guide/yaml.md#x)"),
        ("index.md", "![a](docs/images/steps.svg)", "![a](images/steps.svg)"),
        ("limits.md", "[a](../README.md#x)", "[a](index.md#x)"),
        ("limits.md", "[`a`](../examples/cli.py)", "[`a`](examples/cli.py)"),
        ("guide/yaml.md", "[a](../../examples/cli.py)", "[a](../examples/cli.py)"),
        ("api/memory.md", "[a](../limits.md)", "[a](../limits.md)"),
        ("examples/README.md", "[a](slurm), [b](workloads)", "a, [b](workloads/README.md)"),
        ("examples/workloads/README.md", "[a](../../docs/systems.md)", "[a](../../systems.md)"),
        ("limits.md", "[a](https://example.org/x), [b](#x)", "[a](https://example.org/x), [b](#x)"),
        ("limits.md", "[a](../nothing.md)", "[a](../nothing.md)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(uri: str, link: str, expected: str) -> None:
    assert moved(link, uri) == expected


@pytest.mark.slow
def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path) -> None:
    for part in ("examples", "lightning_safusion", "mkdocs.yml", "README.md", "CHANGELOG.md", "LICENSE"):
        (tmp_path / part).symlink_to(ROOT / part)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "lab").mkdir()
    shutil.copy(ROOT / "lab" / "site_hooks.py", tmp_path / "lab")
    page = tmp_path / "docs" / "systems.md"
    wrong = ["nowhere.md", "limits.md#no-such-heading", "../nothing.py"]
    links = " ".join(f"[gone]({link})" for link in wrong)
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}\n", encoding="utf-8")
    ended = build(tmp_path, tmp_path / "site")
    assert ended.returncode != 0
    assert [link for link in wrong if link not in ended.stderr] == []
