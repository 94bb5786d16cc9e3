"""GBNF grammars mean what llama.cpp means by them: a recogniser that knows nothing of Lark is the oracle."""

import contextlib
import functools

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import RequestError
from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.serve.gbnf import lark_of
from cairn.serve.grammar import Grammars
from cairn.serve.structured_output import grammar_guide, read_guide

JSON = r"""
# a JSON value, as the README of llama.cpp has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
)? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@functools.cache
def grammars() -> Grammars:
    backend = tiny_tokenizers.byte_level()
    return Grammars(Tokenizer(backend, SpecialTokens(eos_ids=(0,))), backend.get_vocab_size(), [0])


def accepts(grammar: str, text: str) -> bool:
    """Would an answer of exactly this text follow the grammar?"""
    constraint = grammars().compile(grammar_guide(grammar, "grammar")).start()
    ids = grammars().tokenizer.encode(text, special=False)
    return all(constraint.accept(token) is None for token in [*ids, 0])


# -- the oracle: expressions over a and b, as tuples ----------------------------------------------

LEAVES = st.sampled_from([("text", "a"), ("text", "ab"), ("text", ""), ("any",), ("class", "b"),
                          ("rule", "x"), ("rule", "y-2")])  # fmt: skip
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.just("seq"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(
            st.just("times"), inner, st.sampled_from([(0, 1), (0, 9), (1, 9), (1, 2), (2, 2)])
        ),
    ),
    max_leaves=6,
)
BOUNDS = {(0, 1): "?", (0, 9): "*", (1, 9): "+", (1, 2): "{1,2}", (2, 2): "{2}"}


def spelled(node: tuple) -> str:
    match node:
        case ("text", text):
            return f'"{text}"'
        case ("any",):
            return "."
        case ("class", one):
            return f"[{one}-{one}]"
        case ("rule", name):
            return name
        case ("seq", left, right):
            return f"({spelled(left)} {spelled(right)})"
        case ("or", left, right):
            return f"({spelled(left)} |\n {spelled(right)})"
        case ("times", inner, bounds):
            return f"({spelled(inner)}){BOUNDS[bounds]}"
    raise AssertionError(node)


def ends(node: tuple, text: str, at: int, rules: dict[str, tuple]) -> set[int]:
    """Where a match that begins at `at` can end. Rules name later ones only, so it ends."""
    match node:
        case ("text", wanted):
            return {at + len(wanted)} if text.startswith(wanted, at) else set()
        case ("any",):
            return {at + 1} if at < len(text) else set()
        case ("class", one):
            return {at + 1} if text[at : at + 1] == one else set()
        case ("rule", name):
            return ends(rules[name], text, at, rules)
        case ("seq", left, right):
            middles = ends(left, text, at, rules)
            return {end for middle in middles for end in ends(right, text, middle, rules)}
        case ("or", left, right):
            return ends(left, text, at, rules) | ends(right, text, at, rules)
        case ("times", inner, (least, most)):
            found, here = ({at} if least == 0 else set()), {at}
            for count in range(1, (len(text) + 2 if most == 9 else most) + 1):
                here = {end for start in here for end in ends(inner, text, start, rules)}
                found |= here if count >= least else set()
            return found
    raise AssertionError(node)


def without_rules(node: tuple, *names: str) -> tuple:
    if node[0] == "rule" and node[1] in names:
        return ("text", "b")
    return tuple(
        without_rules(part, *names)
        if isinstance(part, tuple) and part and isinstance(part[0], str)
        else part
        for part in node
    )


@settings(max_examples=40)
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, st.lists(st.text("ab", max_size=6), min_size=3))
def test_the_same_texts_are_accepted(root, x, y, texts):
    rules = {"x": without_rules(x, "x"), "y-2": without_rules(y, "x", "y-2")}
    grammar = f"root ::= {spelled(root)}\nx ::= {spelled(rules['x'])} # x\ny-2 ::= {spelled(rules['y-2'])}"
    for text in texts:
        assert accepts(grammar, text) == (len(text) in ends(root, text, 0, rules)), (grammar, text)


# -- by example -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"a": [1, -2.5, "x\\n\\u00e9", {}], "b": null}', True),
        ("[]", False),
        ('{"a": 01}', False),
        ('{"a"  : 1}', False),
        ('{"a": "\x1f"}', False),
        ('{"a":\n\t"é"}', True),
    ],
)
def test_json_as_llama_cpp_writes_it(text, fine):
    assert accepts(JSON, text) is fine


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u0041\x42\U0001F600\t\"\\"', 'AB😀\t"\\'),
        (r"root ::= [\u00e9-\u00eb/^-]+", "é/^-"),
        (r"root ::= [^\n]* [\n]", "a/b\n"),
        ("root::=[a-]", "-"),
        ('root ::= ("a" | )\n\n  \nx ::= "b"', ""),
        ("root ::= . .", "\né"),
        ('root ::= [a-z]* "x"', "axbx"),
    ],
)
def test_escapes_classes_and_space(grammar, text):
    assert accepts(grammar, text)
    assert not accepts(grammar, f"{text}ñ")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [('x ::= "a"', "no rule 'root'"), ("root ::= roof", "line 1: the rule 'roof' is not defined"),
     ('\nroot ::= "a', "line 2: a text is not closed"), ("root ::= [a", "a class is not closed"),
     ("root ::= []", "a class is empty"), ("root ::= [b-a]", "b-a"), ('root ::= ("a"', "not closed"),
     ('root ::= "a"{x}', "repetition"), (r'root ::= "\q"', r"'\\q' means no character"),
     ('root ::= "a" ) "b"', "has no place"), ('root "a"\nx ::= "b"', "'::=' has to follow"),
     (r'root ::= "\ud800"', "no character"), (r"root ::= [\u12", "no character"), ("root ::= a\\", "has no place"),
     ('root ::= "a"\nroot ::= "b"', "twice"), (f'root ::= {"(" * 99}"a"', "nested more than 64"),
     ("root ::= root", "no answer can begin")],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(grammar, said):
    with pytest.raises(RequestError, match=said):
        grammars().compile(grammar_guide(grammar, "grammar"))


@given(st.text('abxroot:="[]()^-|*+?{}1,.\\nu \n#', max_size=40))
def test_any_text_is_translated_or_refused(text):
    with contextlib.suppress(RequestError):  # any other error fails
        assert lark_of("root ::= " + text, "grammar").startswith("start: ")


def test_lark_stays_lark_and_all_fields_read_both():
    assert grammar_guide('start: "a" // x ::= y', "grammar").kind == "lark"
    guide = read_guide(guided_grammar='root ::= "a"')
    assert guide is not None
    assert guide.kind == "gbnf"
