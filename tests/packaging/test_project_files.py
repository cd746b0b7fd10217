"""Files for those who publish, cite and report: they name what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_safusion.__about__ import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [job])]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in _steps(workflow):
        commands = step.get("run", "")
        assert set(re.findall(r"\bmake (\w+)", commands)) <= targets
        assert all((ROOT / path).exists() for path in re.findall(r"(?<!\S)(?:scripts|examples)/[\w./]+", commands))
        used = step.get("uses", "")
        if used.startswith("./"):
            assert (ROOT / used).exists()
        elif used:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", used), "an action is pinned by its major version"


def test_a_release_is_published_without_a_token() -> None:
    publish = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)


def test_what_is_built_for_a_release_knows_its_repository() -> None:
    (build,) = (step for step in _steps(ROOT / ".github/workflows/wheels.yml") if "build_wheels" in step.get("run", ""))
    assert build["env"] == {"SAFUSION_URL": "${{ github.server_url }}/${{ github.repository }}"}


def test_addresses_of_other_sites_are_tried_every_week_and_hold_up_no_change() -> None:
    path = ROOT / ".github" / "workflows" / "docs.yml"
    docs = yaml.safe_load(path.read_text())
    assert docs[True]["schedule"]  # YAML 1.1 takes "on" for a truth value
    (at,) = (place for place, step in enumerate(_steps(path)) if "lychee" in step.get("uses", ""))
    checked, before = _steps(path)[at], _steps(path)[:at]
    assert checked["continue-on-error"] == "${{ github.event_name != 'schedule' }}"
    assert checked["with"]["fail"]
    site = re.findall(r"^site_dir: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert checked["with"]["args"].split()[-2:] == [*site, "*.md"]
    assert any("make docs" in step.get("run", "") for step in before)  # which builds the site


def test_the_citation_is_of_this_version_and_of_the_papers_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == __version__
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{__version__}}}" in readme.partition("@software")[2]
    named = set(re.findall(r"https://doi\.org/([\w./]+)", readme))
    assert {paper["doi"] for paper in citation["references"]} == named


def test_security_and_contributing_are_found_where_forges_look() -> None:
    assert "Report" in (ROOT / "SECURITY.md").read_text()
    assert "docs/contributing.md" in (ROOT / "CONTRIBUTING.md").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().count("## [Unreleased]") <= 1
