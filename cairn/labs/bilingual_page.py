"""A page in two languages: both texts are in it, and two radio buttons show one, by style alone.

    switch(language)   the buttons, once at the top
    both(words)        a text in both languages

It works without a script and without a network. Knows nothing about what the page shows.
"""

from cairn.labs.lab import Language, Words
from cairn.report.page import Markup, element, join


def both(words: Words, tag: str = "span") -> Markup:
    """The text in both languages; the switch shows one."""
    if words.en == words.zh:
        return element(tag, words.en)
    return join(
        [
            element(tag, words.en, class_="en", lang="en"),
            element(tag, words.zh, class_="zh", lang="zh-CN"),
        ]
    )


def switch(language: Language) -> Markup:
    """Two radio buttons; the style sheet hides the language that is not chosen."""
    parts = []
    for name, label in (("en", "English"), ("zh", "中文")):
        button = Markup(
            f'<input type="radio" name="language" id="language-{name}"'
            f"{' checked' if name == language else ''}>"
        )
        parts.append(join([button, element("label", label, for_=f"language-{name}")]))
    return element("p", *parts, class_="switch")


def language_tag(language: str) -> str:
    return "zh-CN" if language == "zh" else "en"


STYLE = """
body:has(#language-en:checked) .zh, body:has(#language-zh:checked) .en { display: none; }
.switch label { margin: 0 1rem 0 .2rem; }
"""
