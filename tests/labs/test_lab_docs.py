"""The list of labs in docs/labs.md is the one that the command prints."""

from pathlib import Path

from cairn.cli.learn.lab_show import markdown
from cairn.labs.catalogue import all_labs

DOCS = Path(__file__).parents[2] / "docs" / "labs.md"
MARK = "<!-- from `cairn lab list --markdown`; a test compares -->\n\n"


def test_the_list_in_the_docs_is_current():
    """Write it anew: keep the part up to the mark, then append `cairn lab list --markdown`."""
    head, mark, listed = DOCS.read_text(encoding="utf-8").partition(MARK)
    assert head
    assert mark
    assert listed == markdown(list(all_labs().values()), "en")
