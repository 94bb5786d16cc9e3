"""Markdown on the page: like the reference where models use it, and harmless whatever it is.

The oracle is markdown-it (CommonMark and tables), which comes with rich. Its HTML and ours are compared as trees.
"""

import random
import re
from html.parser import HTMLParser

from markdown_it import MarkdownIt

SAMPLES = [
    "Just a line.",
    "Two\nlines",
    "One\n\nTwo",
    "# Title\ntext",
    "### Deep ###",
    "a **bold** b *em* c `code` d ~~gone~~ e",
    "***both*** and __strong__ and _em_",
    "snake_case_name and 2 * 3 * 4 and a*b",
    "- a\n- b\n- c",
    "* a\n* b",
    "1. a\n2. b\n3. c",
    "3. c\n4. d",
    "- a\n  - b\n  - c\n- d",
    "1. a\n   - b\n   - c\n2. d",
    "Intro:\n- a\n- b\n\nOutro",
    "- **Bold**: text `x`\n- *em*",
    "```python\nprint('<b>')\n\nx = 1\n```",
    "~~~\na\n~~~",
    "text\n```\ncode\n```\ntext",
    "1. do\n   ```\n   code\n   ```\n2. done",
    "> quote\n> more\n\nend",
    "> **bold** in quote",
    "a\n\n---\n\nb",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
    "| l | r |\n|:--|--:|\n| *x* | `y` |",
    "[label](https://a.example/b)",
    "see [**b**](http://a.example) now",
    "``a ` b``",
    "\\*not em\\*",
    "<script>alert(1)</script>",
    "a < b && c > d",
    "1) a\n2) b",
    "**a** **b** *c* *d*",
    "`*x*` **`y`**",
    "unclosed **bold and `code",
    "####### seven",
    "#nospace",
    "5 - 3\n- a",
]
SIGNS = [
    "*",
    "_",
    "`",
    "~",
    "#",
    ">",
    "-",
    "1.",
    "|",
    "[",
    "](",
    ")",
    "!",
    "\\",
    "\n",
    "\n\n",
    "  ",
    " ",
    "```",
    "<",
    "&",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    "data:text/html,x",
    "https://a.example",
    "word",
    "Ünï",
    "\t",
    "\r",
]
TAGS = re.compile(
    "P|H[3-6]|UL|OL|LI|BLOCKQUOTE|HR|FIGURE|FIGCAPTION|SPAN|BUTTON|SVG|PATH|PRE|CODE|DIV|TABLE|THEAD|TBODY|TR|TH|TD"
    "|STRONG|EM|S|A|I"
)
DRAW = """async texts => {
    const {markdownView} = await import("/web/chat/markdown_dom.js");
    const holder = document.createElement("div");
    document.body.append(holder);
    return texts.map(text => {
        const view = markdownView();
        holder.replaceChildren(view.element);
        view.show(text);
        const all = [...view.element.querySelectorAll("*")];
        return {
            html: view.element.innerHTML, text: view.element.textContent, tags: all.map(e => e.tagName.toUpperCase()),
            attributes: all.flatMap(e => e.getAttributeNames()), links: all.filter(e => e.href).map(e => e.protocol),
        };
    });
}"""


class Tree(HTMLParser):
    """Tags and words, without what is only dress."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._skipped = 0
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag in ("figcaption", "svg"):
            self._skipped += 1
        if tag == "h1" or re.fullmatch("h[2-6]", tag):
            tag = "heading"
        given = dict(attributes)
        extra = [given[name] for name in ("href", "start") if given.get(name)]
        if not self._skipped and tag not in ("figure", "div", "path", "p"):
            self.seen.append(f"<{tag} {' '.join(extra)}>")

    def handle_endtag(self, tag):
        if tag in ("figcaption", "svg"):
            self._skipped -= 1

    def handle_data(self, data):
        if not self._skipped:
            self.seen += data.split()


def test_it_is_read_as_the_reference_reads_it(tab):
    reference = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    drawn = tab.page.evaluate(DRAW, SAMPLES)
    wrong = []
    for sample, ours in zip(SAMPLES, drawn, strict=True):
        uncoloured = re.sub("</?i(?: [^>]*)?>", "", ours["html"])
        found, wanted = Tree(uncoloured).seen, Tree(reference.render(sample)).seen
        found = [
            each.replace("example/>", "example>") for each in found
        ]  # the browser's form of an address
        if found != wanted:
            wrong.append((sample, found, wanted))
    assert not wrong


def test_code_has_colours_and_keeps_its_text(tab):
    code = 'if x1 == 0x2f:  # "a comment"\n    return f"{x}\\" in"\n'
    python, text = tab.page.evaluate(DRAW, [f"```{name}\n{code}```" for name in ("python", "text")])
    marked = re.findall('<i class="in-([a-z]+)">([^<]*)</i>', python["html"])
    assert marked[:3] == [("word", "if"), ("number", "0x2f"), ("comment", '# "a comment"')]
    assert marked[3:] == [("word", "return"), ("string", '"{x}\\" in"')]
    assert "<i" not in text["html"]
    assert code.strip() in python["text"]


def test_nothing_is_dangerous_and_no_word_is_lost(tab):
    generator = random.Random(5)
    texts = [
        "".join(generator.choice(SIGNS) for _ in range(generator.randrange(1, 25)))
        for _ in range(1500)
    ]
    for text, drawn in zip(texts, tab.page.evaluate(DRAW, texts), strict=True):
        assert all(map(TAGS.fullmatch, drawn["tags"]))
        assert not [
            name
            for name in drawn["attributes"]
            if name.startswith("on") or name in ("src", "srcdoc", "style")
        ]
        assert set(drawn["links"]) <= {"http:", "https:", "mailto:"}
        if "](" not in text:  # an address is written otherwise, and is no word
            assert drawn["text"].count("Ünï") == text.count("Ünï"), text


def test_growing_text_is_drawn_as_the_whole(tab):
    """Drawn piece by piece, as it streams in, it ends as if it had come at once."""
    whole = "\n\n".join(SAMPLES)
    same = tab.page.evaluate(
        """async whole => {
            const {markdownView} = await import("/web/chat/markdown_dom.js");
            const [grown, once] = [markdownView(), markdownView()];
            for (let end = 1; end < whole.length; end += 7) grown.show(whole.slice(0, end));
            grown.show(whole);
            once.show(whole);
            return grown.element.innerHTML === once.element.innerHTML;
        }""",
        whole,
    )
    assert same
