"""Prose out of markup: Wikipedia's XML, MDN's Markdown and Python's PEPs, as one JSON line per document.

    python clean_text.py --corpora FOLDER --out texts        # writes texts/{wiki,mdn,peps}.jsonl

What is kept is what a person would read aloud: paragraphs that end like sentences. Tables, templates, lists, code,
links and headings go. Nothing is downloaded; FOLDER holds enwik8.gz, mdn_en_us_md.tar.xz, python_peps_rst.tar.xz.
"""

import argparse
import gzip
import html
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# Characters of each corpus at most: a model of this size learns more from simple text than from more of this.
LIMITS = {"wiki": 44_000_000, "mdn": 9_000_000, "peps": 4_000_000}
SHORTEST_PARAGRAPH, SHORTEST_DOCUMENT = 80, 300

PAGE = re.compile(r"<title>([^<]*)</title>.*?<text xml:space=\"preserve\">(.*?)</text>", re.S)
INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", re.S)
WIKI = [
    (re.compile(r"<!--.*?-->|<(ref|math|gallery|table|pre|code|div)\b.*?</\1>", re.S | re.I), " "),
    (re.compile(r"<[^<>]{1,200}>"), " "),
    (re.compile(r"\[\[(?:image|file|category|media|[a-z-]{2,12}):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", re.I), ""),
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp)://[^\s\]]+\s*([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,5}"), ""),
    (re.compile(r"\(\s*[;,]?\s*\)"), ""),
]  # fmt: skip
MARKDOWN = [
    (re.compile(r"\A---\n.*?\n---\n", re.S), ""),
    (re.compile(r"^(```|~~~).*?^\1", re.S | re.M), ""),
    (re.compile(r"<[^<>]{1,300}>"), ""),
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    # {{cssxref("color")}} stands for the word in it.
    (re.compile(r"\{\{\s*\w+\(\s*[\"']([^\"'/]*/)*([^\"']*)[\"'][^}]*\}\}"), r"\2"),
    (re.compile(r"\{\{[^{}]*\}\}"), ""),
    (re.compile(r"[*_]{2}|`"), ""),
]
RESTRUCTURED = [
    (re.compile(r"\A.*?\n\n", re.S), ""),  # the table of fields
    (re.compile(r":\w+:`([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]*?)\s*<[^>]*>`_+"), r"\1"),
    (re.compile(r"``|`_+|`|\*\*|\[#?[\w-]+\]_"), ""),
]
NOT_PROSE = re.compile(r"^[\s*#:;|!=>+~.-]|^\d+\.|\n[ \t]")
LETTERS = re.compile(r"[A-Za-z ,.']")


def wiki(corpora: Path) -> Iterator[str]:
    with gzip.open(corpora / "enwik8.gz", "rt", encoding="utf-8", errors="replace") as file:
        whole = file.read()
    for title, body in PAGE.findall(whole):
        if body.lstrip()[:9].upper() == "#REDIRECT" or ":" in title:
            continue
        body = html.unescape(html.unescape(body))
        for _ in range(4):  # templates inside templates, from the inside out
            body = INNER_TEMPLATE.sub("", body)
        # A line is a paragraph here.
        yield from document("\n\n".join(_replace(body, WIKI).split("\n")))


def _members(archive: Path, suffix: str) -> Iterator[str]:
    with tarfile.open(archive) as files:
        members = (item for item in files if item.isfile() and item.name.endswith(suffix))
        for member in members:
            stream = files.extractfile(member)
            if stream is not None:
                yield stream.read().decode("utf-8", "replace")


def mdn(corpora: Path) -> Iterator[str]:
    for text in _members(corpora / "mdn_en_us_md.tar.xz", ".md"):
        yield from document(_replace(text, MARKDOWN))


def peps(corpora: Path) -> Iterator[str]:
    for text in _members(corpora / "python_peps_rst.tar.xz", ".rst"):
        yield from document(_replace(text, RESTRUCTURED))


def _replace(text: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, instead in rules:
        text = pattern.sub(instead, text)
    return text


def document(text: str) -> Iterator[str]:
    """The paragraphs that read as prose, if there are enough of them."""
    kept = [" ".join(part.split()) for part in text.split("\n\n") if is_prose(part.strip("\n"))]
    whole = "\n\n".join(kept)
    if len(whole) >= SHORTEST_DOCUMENT:
        yield whole


def is_prose(part: str) -> bool:
    if len(part) < SHORTEST_PARAGRAPH or NOT_PROSE.search(part) or "|" in part or "{" in part:
        return False
    if part.rstrip()[-1] not in ".!?\"'":
        return False
    return len(LETTERS.findall(part)) > 0.88 * len(part)


def spread(documents: Iterable[str], limit: int) -> Iterator[str]:
    """As many documents as the limit allows, evenly from the whole of the corpus."""
    found = list(documents)
    size = sum(map(len, found))
    taken = seen = 0
    for text in found:
        seen += len(text)
        if taken + len(text) <= limit * min(1.0, seen / size):
            taken += len(text)
            yield text


SOURCES: dict[str, Callable[[Path], Iterator[str]]] = {"wiki": wiki, "mdn": mdn, "peps": peps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, read in SOURCES.items():
        count = chars = 0
        with (options.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for text in spread(read(options.corpora), LIMITS[name]):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count, chars = count + 1, chars + len(text)
        print(f"{name}: {count} documents, {chars / 1e6:.1f} million characters", flush=True)


if __name__ == "__main__":
    main()
