"""A chat template has a budget: whatever it does, it ends soon and stays small; honest ones never notice."""

import resource
import time

import pytest

from cairn.core.errors import TokenizerError
from cairn.models import template_budget
from cairn.models.chat_template import ChatTemplates
from cairn.models.template_sandbox import SandboxedTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(source, messages=HI):
    return ChatTemplates({"default": source}, {}, "toy").render(messages)


DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
BOMBS = {
    "nested loops": "{% for a in range(1000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that keep nothing": "{% for a in range(30000) %}{% for b in range(3) if false %}{% endfor %}{% endfor %}",
    "range": "{{ range(1000000000) | length }}",
    "text times": "{{ 'x' * 1000000000 }}",
    "times text": "{{ 1000000000 * 'x' }}",
    "list times": "{{ [0] * 1000000000 }}",
    "power": "{{ 10 ** 1000000000 }}",
    "tower": "{{ 2 ** 3 ** 100000 }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "rjust": "{{ 'x'.rjust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "center method": "{{ 'x'.center(1000000000) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "center, mapped": "{{ ['x'] | map('center', 1000000000) | list }}",
    "indent": "{{ 'x' | indent(1000000000, true) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(1000000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "join": "{{ ('x' * 100000).join('y' * 100000) }}",
    "join filter": "{{ ('y' * 100000) | list | join('x' * 100000) }}",
    "join, lazy": "{{ ('y' * 100000) | map('upper') | join('x' * 100000) }}",
    "replace": "{{ ('y' * 100000) | replace('y', 'x' * 100000) }}",
    "replace method": "{{ ('y' * 100000).replace('', 'x' * 100000) }}",
    "translate": "{{ ('y' * 100000).translate({121: 'x' * 100000}) }}",
    "wordwrap": "{{ ('y' * 100000) | wordwrap(1, true, 'x' * 100000) }}",
    "format": "{{ '{:>1000000000}'.format('x') }}",
    "format, nested": "{{ '{:>{}}'.format('x', 1000000000) }}",
    "format, many": "{{ ('{0}' * 10000).format('x' * 100000) }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "percent": "{{ '%1000000000s' % 'x' }}",
    "percent star": "{{ '%*s' % (1000000000, 'x') }}",
    "tojson": "{{ [[[[0]]]] | tojson(indent=1000000000) }}",
    "batch": "{{ [0] | batch(1000000000, 0) | list }}",
    "slice": "{{ [0] | slice(1000000000, 0) | list }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "numbers": DOUBLED.replace("START", "3").replace("STEP", "ns.x * ns.x"),
    "tilde": DOUBLED.replace("START", "'x'").replace("STEP", "ns.x ~ ns.x"),
    "plus": DOUBLED.replace("START", "'x'").replace("STEP", "ns.x + ns.x"),
    "list plus": DOUBLED.replace("START", "[0]").replace("STEP", "ns.x + ns.x"),
    "list in list": DOUBLED.replace("START", "0").replace("STEP", "[ns.x, ns.x]"),
    "tuple in tuple": DOUBLED.replace("START", "0").replace("STEP", "(ns.x, ns.x)"),
    "dict in dict": DOUBLED.replace("START", "0").replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "dict of dict": DOUBLED.replace("START", "0").replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "fromkeys": DOUBLED.replace("START", "0").replace("STEP", "dict.fromkeys('ab', ns.x)"),
    "cycler": DOUBLED.replace("START", "0").replace("STEP", "cycler(ns.x, ns.x).items"),
    "batches": DOUBLED.replace("START", "[0]").replace("STEP", "(ns.x + ns.x) | batch(2) | list"),
    "set block": "{% set x = 'x' %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40
    + "{{ x | length }}",
    "macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set x = 'x' %}"
    + "{% set x = m(x) %}" * 40
    + "{{ x | length }}",
    "kept slices": "{% set x = 'x' * 100000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(10000) %}{% set ns.l = ns.l + [x[i:]] %}{% endfor %}",
    "scans": "{% set x = 'x' * 4000000 %}{% for i in range(30000) %}{% set y = x.count('y') %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_fill_the_memory_or_run_for_long(name, monkeypatch):
    monkeypatch.setattr(
        template_budget, "MAX_TEXT", 1 << 22
    )  # less than usual, for the time of the test
    monkeypatch.setattr(template_budget, "MAX_STEPS", 40_000)
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match="chat template of toy"):
        render(BOMBS[name])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # KiB
    assert time.thread_time() - began < 1


def test_time_is_bounded_where_steps_are_few(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.05)
    source = "{% set x = 'x' * 60000000 %}{% for i in range(1000) %}{% if 'y' in x %}{% endif %}{% endfor %}"
    with pytest.raises(TokenizerError, match=r"0\.05 seconds"):
        render(source)


def test_the_error_names_the_template():
    many = ChatTemplates({"default": "", "tool_use": "{{ 'x' * 1000000000 }}"}, {}, "toy")
    with pytest.raises(TokenizerError, match="the chat template 'tool_use' of toy does too much"):
        many.render(HI, tools=[])


def test_a_template_cannot_write_without_end(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_TEXT", 1000)
    assert len(render("{% for a in range(10) %}{{ 'x' * 100 }}{% endfor %}")) == 1000
    with pytest.raises(TokenizerError, match="longer than 1000"):
        render("{% for a in range(11) %}{{ 'x' * 100 }}{% endfor %}")


def test_a_long_conversation_is_no_bomb(monkeypatch):
    """3.2 MB in 400 messages, with a template that looks at each in many ways, take less than a twentieth."""
    source = (
        "{% for m in messages %}{% if m['role'] in ['user', 'tool'] and m.content is string %}"
        "{{ '<|im_start|>' + m.role + '\\n' ~ (m.content | trim) ~ '<|im_end|>' }}"
        "{% set parts = m.content.split('</think>') %}{{ parts[-1][:10] | tojson }}"
        "{{ [m.role, loop.last] | join(',') }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 1600}] * 400
    monkeypatch.setattr(template_budget, "MAX_STEPS", template_budget.MAX_STEPS // 20)
    assert len(render(source, messages)) > 3_200_000


def test_each_rendering_has_its_own_steps(monkeypatch):
    monkeypatch.setattr(template_budget, "MAX_STEPS", 1000)
    source = "{% for a in range(400) %}{% endfor %}x"
    template = SandboxedTemplate(source, "toy")
    assert all(template.render({}) == "x" for _ in range(15))
