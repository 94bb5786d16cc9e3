"""The documentation points to files that exist, and its generated parts are what their programs write."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from cairn.bench.figures import figures
from cairn.bench.overview import put_into
from cairn.labs.roadmap import load
from cairn.labs.roadmap_markdown import markdown

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|json|md|js|css))`")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
OWN = re.compile(r"\]\(()(#[^)\s]+)\)")  # into the same page
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|js))`,\s+(`\w+`(?:(?:,|\sand|,\sand)\s+`\w+`)*)")
FOLDERS = ("cairn", "tests", "docs", "benchmarks", "examples", "deploy")
EXAMPLE = re.compile(r"(^|[/_])[A-Z]{2,}\b|/name\.py$")  # cairn/labs/AREA/name.py stands for many


@cache
def files():
    return [f"/{path.relative_to(ROOT)}" for one in FOLDERS for path in (ROOT / one).rglob("*.*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    """A page may begin a path at its own floor: `engine/batch.py`."""
    named = {name for name in FILE.findall(page.read_text()) if not EXAMPLE.search(name)}
    missing = [name for name in named if not any(f"/{name}" in path for path in files())]
    assert sorted(missing) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    targets = [link for link, _ in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def slug(heading):
    """As the site writes it: small letters, what is no letter or digit gone, hyphens for spaces."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@cache
def anchors(page):
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    return {slug(heading) for heading in re.findall(r"(?m)^#+ (.+)$", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_find_their_heading(page):
    lost = []
    for link, anchor in [*LINK.findall(page.read_text()), *OWN.findall(page.read_text())]:
        target = page.parent / link if link else page
        if anchor and "://" not in link and target.suffix == ".md":
            lost += [link + anchor] if anchor[1:] not in anchors(target) else []
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_named_after_a_file_are_in_it(page):
    """`plan/device.py`, `device` and `choices`: the walks through the code name what to look for."""
    lost = []
    for name, rest in NAMED.findall(page.read_text()):
        if EXAMPLE.search(name):
            continue
        texts = [(ROOT / path[1:]).read_text() for path in files() if path.endswith(f"/{name}")]
        for word in re.findall(r"`(\w+)`", rest):
            if not any(re.search(rf"\b{word}\b", text) for text in texts):
                lost.append(f"{name}: {word}")
    assert lost == []


def test_every_page_is_in_the_navigation():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    groups = [group for entry in nav for group in entry.values()]
    listed = [page for group in groups for entry in group for page in entry.values()]
    assert sorted(listed) == sorted(page.name for page in ROOT.glob("docs/*.md"))


def test_the_figures_are_drawn_from_the_records():
    for name, drawn in figures(ROOT / "benchmarks").items():
        assert (ROOT / "docs" / "figures" / name).read_text() == drawn, name


def test_pictures_are_small_and_described():
    """A page that shows before it tells must not take long to load, and says in words what it shows."""
    for picture in (ROOT / "docs" / "figures").glob("*.png"):
        assert picture.stat().st_size < 300_000, picture.name
    for page in PAGES:
        shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
        assert all(words for words, _ in shown), page.name


def test_the_benchmark_page_has_the_records_figures():
    page = ROOT / "docs" / "benchmarks.md"
    assert page.read_text() == put_into(page.read_text(), ROOT / "benchmarks")


def test_the_roadmap_page_has_every_topic():
    assert (ROOT / "docs" / "roadmap.md").read_text() == markdown(load())
