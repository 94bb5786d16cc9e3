"""Answers keep to their grammar, whatever the model would rather say: random models, all ways of the loop."""

import asyncio
import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import real_tokenizers
import tiny_tokenizers
import torch
from tiny_engines import at_rest

from cairn.core.errors import RequestError
from cairn.kernels.sampling.penalties import bits_reference
from cairn.models.build import ModelBuild
from cairn.models.presets import preset
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.serve.grammar import GrammarConstraint, Grammars
from cairn.serve.http.tools.tool_parser import CLOSE, OPEN, TOOL_CALLS, parse_all, tool_parser
from cairn.serve.http.tools.tools import hides_marks, read_tools, tool_guide
from cairn.serve.json_schema import FORMATS
from cairn.serve.structured_output import MOST_CHARACTERS, Guide, read_guide

VOCABULARY = 450  # more rows than tokens, and no multiple of 32
EOS = 0
SCHEMA = {
    "title": "Thing",
    "type": "object",
    "properties": {
        "kind": {"enum": ["big", "small"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999, "description": "how many"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["kind", "count", "tags", "open"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 4}},
}
CHOICES = ["yes", "no", "yes, of course", 'say "é😀"\n\\', "nothing"]
REGEX = r"[a-f]{2,5}-[0-9]{1,4}(\.[0-9]{1,8}){0,2}"
LARK = r"""
start: "(" item ("," item){0,3} ")"
item: /[a-z]{1,3}/ | "[" NUMBER "]"
NUMBER: /[0-9]{1,2}/
"""
ITEM = r"([a-z]{1,3}|\[[0-9]{1,2}\])"


def fits_schema(text: str) -> bool:
    thing = json.loads(text)
    fields = thing.keys() == {"kind", "count", "tags", "open"} and thing["kind"] in ("big", "small")
    whole = type(thing["count"]) is int and 0 <= thing["count"] <= 999
    tags = 1 <= len(thing["tags"]) <= 3 and all(len(tag) <= 4 for tag in thing["tags"])
    return fields and whole and tags and type(thing["open"]) is bool


GUIDES = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        fits_schema,
    ),
    "regex": ({"guided_regex": REGEX}, lambda text: re.fullmatch(REGEX, text)),
    "choice": ({"structured_outputs": {"choice": CHOICES}}, lambda text: text in CHOICES),
    "lark": (
        {"guided_grammar": LARK},
        lambda text: re.fullmatch(rf"\({ITEM}(,{ITEM}){{0,3}}\)", text),
    ),
}


@functools.cache
def tokenizer() -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_tokens([OPEN, CLOSE])
    backend.add_special_tokens([TOOL_CALLS])
    return Tokenizer(backend, SpecialTokens(eos_ids=(EOS,)))


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCABULARY)


def guide_of(**fields: object) -> Guide:
    found = read_guide(**fields)
    assert found is not None
    return found


def constraint(**fields: object) -> GrammarConstraint:
    return grammars().compile(guide_of(**fields)).start()


@functools.cache
def net():
    spec = msgspec.structs.replace(preset("tiny-qwen3"), vocab=VOCABULARY, context=1024)
    return random_model(spec, ModelBuild(device="cpu", dtype=torch.float32), seed=3)


def new_engine(*, overlap=False, tight=False, **drafts):
    config = EngineConfig(
        model="tiny",
        device="cpu",
        dtype="float32",
        block_size=16,
        max_num_seqs=16,
        plain=True,
        max_num_batched_tokens=24 if tight else 512,
        num_gpu_blocks_override=16 if tight else 400,
        **drafts,
    )
    model = net()
    engine = start_with(
        OpenModel("tiny", model.spec, None, (), None), Runnable("tiny", model, "a test"), config
    ).engine
    engine.overlap = overlap
    return engine


def ask(engine, prompt, rule=None, **params):
    wish = {"temperature": 0.0, "max_tokens": 400} | params
    request = Request(
        engine.scheduler.queues.arrivals,
        prompt,
        SamplingParams(**wish),
        eos_ids=[EOS],
        constraint=rule,
    )
    engine.add(request)
    return request


def text_of(request: Request) -> str:
    return tokenizer().decode(request.outputs[:-1], skip_special=False)


PROMPTS = [tokenizer().encode(text) for text in ("Once upon", "Größe", "It is 12 o'clock, the")]


@functools.cache
def free_answers() -> list[list[int]]:
    """What the unconstrained say when they are alone."""
    engine = new_engine()
    requests = [ask(engine, prompt, max_tokens=40, ignore_eos=True) for prompt in PROMPTS]
    engine.run()
    return [request.outputs for request in requests]


SEEN: dict[str, list[list[int]]] = {}


WAYS = [{}, {"overlap": True}, {"tight": True}, {"tight": True, "overlap": True}]
DRAWS = [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_k": 40, "seed": 5}]
NO_LINES = dict.fromkeys(map(tokenizer().id, "Ċč"), -100.0)  # random models like to indent


@pytest.mark.parametrize("switches", WAYS, ids=str)
def test_every_answer_fits_its_grammar_beside_others_that_have_none(switches):
    engine = new_engine(**switches)
    free = [ask(engine, prompt, max_tokens=40, ignore_eos=True) for prompt in PROMPTS]
    asked = []
    for at, (guide, fits) in enumerate(GUIDES.values()):
        for params in (
            {},
            {"temperature": 1.0, "seed": at},
            {"temperature": 2.0, "top_k": 40, "seed": at},
        ):
            rule = constraint(**guide)
            asked.append((ask(engine, PROMPTS[at % 3], rule, logit_bias=NO_LINES, **params), fits))
    engine.run()
    for request, fits in asked:
        assert (request.finish, request.stop_reason, request.outputs[-1]) == ("stop", None, EOS)
        assert fits(text_of(request)), text_of(request)
    assert [request.outputs for request in free] == free_answers()
    if switches.get("tight"):
        assert sum(request.ledger.preemptions for request, _ in asked) > 0
    answers = [request.outputs for request, _ in asked]
    assert SEEN.setdefault("first", answers) == answers  # the same in all ways of the loop
    at_rest(engine)


def test_a_constrained_request_is_never_ahead_of_its_own_tokens():
    engine = new_engine(overlap=True)
    mine = ask(engine, PROMPTS[0], constraint(guided_regex="[0-9]{30}"))
    other = ask(engine, PROMPTS[1], max_tokens=80, ignore_eos=True)
    before = 0
    while engine.has_work:
        engine.step()
        assert mine.pending <= 1
        if mine.state == "running" and before:
            assert other.total > before  # the other is in every step
        before = other.total if other.state == "running" else 0
    assert re.fullmatch("[0-9]{30}", text_of(mine))
    assert len(other.outputs) == 80


@pytest.mark.parametrize("overlap", [False, True])
def test_other_wishes_hold_within_the_grammar(overlap):
    engine = new_engine(overlap=overlap)
    digits = tokenizer().id("7")
    biased = ask(
        engine, PROMPTS[0], constraint(guided_regex="[0-9]{4}"), logit_bias={digits: 100.0}
    )
    long = ask(
        engine, PROMPTS[0], constraint(guided_regex="a{1,9}"), min_tokens=6, logit_bias={EOS: 100.0}
    )
    short = ask(engine, PROMPTS[0], constraint(guided_choice=["no"]), min_tokens=20)
    ignoring = ask(
        engine, PROMPTS[0], constraint(guided_choice=["no"]), ignore_eos=True, logprobs=2
    )
    penalised = ask(engine, PROMPTS[0], constraint(guided_regex="[ab]{6}"), frequency_penalty=2.0)
    cut = ask(engine, PROMPTS[0], constraint(guided_regex="[0-9]{9}"), max_tokens=2)
    scored = {}
    for output in engine.run():
        if output.request is ignoring:
            scored.setdefault("found", []).extend(output.logprobs)
    assert text_of(biased) == "7777"
    assert (len(long.outputs), set(text_of(long))) == (6 + 1, {"a"}) or len(text_of(long)) == 9
    assert (text_of(short), short.finish) == ("no", "stop")  # the grammar has no longer answer
    assert (text_of(ignoring), ignoring.finish) == ("no", "stop")
    assert len(scored["found"]) == len(ignoring.outputs)
    assert re.fullmatch("[ab]{6}", text_of(penalised))
    assert (cut.finish, len(cut.outputs)) == ("length", 2)
    at_rest(engine)


@pytest.mark.parametrize(
    ("speculate", "switches"), [("grammar", {}), ("suffix", {"overlap": True, "tight": True})]
)
def test_what_a_grammar_forces_is_drafted(switches, speculate):
    """The same answers in fewer steps; ends of the grammar and stop tokens inside a run included."""
    answers, steps = {}, {}
    for who in ("off", speculate):
        engine = new_engine(**switches, speculate=who, draft_tokens=5)
        asked = [
            ask(engine, prompt, constraint(**guide), logit_bias=NO_LINES, **params)
            for guide, _ in GUIDES.values()
            for prompt, params in zip(PROMPTS, DRAWS, strict=True)
        ]
        engine.run()
        answers[who] = [(r.outputs, r.finish, r.stop_reason, r.error) for r in asked]
        steps[who] = engine.steps
        at_rest(engine)
    assert answers[speculate] == answers["off"]
    counts = engine.scheduler.speculation.counts
    assert counts.accepted > 0.2 * counts.drafted > 0
    assert steps[speculate] < steps["off"]


def test_a_grammar_says_what_it_forces_and_follows():
    rule = constraint(guided_choice=["yes, of course"])
    forced = rule.forced()
    assert tokenizer().decode(forced) == "yes, of course"
    wrong = [*forced[:2], tokenizer().id("7")]
    assert rule.followed(wrong) == 2
    for token in forced:
        assert rule.accept(token) is None
    assert rule.accept(EOS) is None
    assert rule.finished
    assert (list(rule.forced()), rule.followed(forced)) == ([], 0)


class Stubborn:
    """Allows everything, and refuses the third token."""

    finished = False

    def __init__(self) -> None:
        self.count = 0

    def mask(self) -> np.ndarray:
        return np.full(-(-VOCABULARY // 32), -1, dtype=np.int32)

    def accept(self, token: int) -> str | None:
        self.count += 1
        return "no third token" if self.count == 3 else None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_fails_ends_its_own_request_only(overlap):
    engine = new_engine(overlap=overlap)
    failing = ask(engine, PROMPTS[0], Stubborn(), ignore_eos=True)
    other = ask(engine, PROMPTS[1], constraint(guided_choice=["yes"]))
    free = ask(engine, PROMPTS[0], max_tokens=40, ignore_eos=True)
    engine.run()
    assert (failing.finish, failing.error, len(failing.outputs)) == ("error", "no third token", 2)
    assert (text_of(other), other.finish) == ("yes", "stop")
    assert free.outputs == free_answers()[0]
    at_rest(engine)


def test_masks_are_the_tokens_that_can_continue_a_choice():
    table = tokenizer()
    spelled = {
        id: b"".join(map(_bytes, table.token(id)))
        for id in range(2, table.vocab_size)
        if not table.token(id).startswith(("<", "｜", "["))
    }
    targets = [choice.encode() for choice in CHOICES]
    for target in targets:
        rule, said = constraint(guided_choice=CHOICES), b""
        for token in [*table.encode(target.decode(), special=False), EOS]:
            words = torch.from_numpy(rule.mask())[None]
            found = set(bits_reference(words, VOCABULARY)[0].nonzero()[:, 0].tolist())
            expected = {
                id
                for id, piece in spelled.items()
                if any(t.startswith(said + piece) for t in targets)
            }
            expected |= {EOS} if said in targets else set()
            # Where the grammar leaves one text only, it allows only the way in which a tokenizer would spell it.
            assert token in found <= expected
            assert said or found == expected
            assert rule.accept(token) is None
            said += spelled.get(token, b"")
        assert rule.finished
        assert rule.accept(token) is not None


def _bytes(char: str) -> bytes:
    from cairn.models.incremental_decode import BYTE_ALPHABET

    return bytes([BYTE_ALPHABET[char]])


def test_a_token_that_does_not_fit_is_refused_and_masks_go_on():
    rule = constraint(guided_regex="[0-9]+")
    error = rule.accept(tokenizer().id("a"))
    assert error is not None
    assert "does not follow the grammar" in error
    assert (rule.mask() == -1).all()


NAMED = {"type": "function", "function": {"name": "count_up"}}


@pytest.mark.parametrize("format", ["hermes", "llama3", "mistral", "json"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_demanded_tool_is_called(format, choice):
    nested = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"to": {"enum": [1, 2]}},
              "required": ["to"], "additionalProperties": False}}}  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {
            "type": "object", "properties": {"at": {"type": "string", "maxLength": 6}}, "required": ["at"],
            "additionalProperties": False}}},
        {"type": "function", "function": {"name": "count_up", "parameters": nested}},
    ]  # fmt: skip
    plan = read_tools(tools, choice, parallel=True)
    guide = tool_guide(plan, format, tokenizer())
    assert guide is not None
    engine = new_engine(overlap=True)
    # Many calls are allowed and this model likes them all: an end is made likely.
    requests = [ask(engine, PROMPTS[i % 3], grammars().compile(guide).start(), temperature=1.0, seed=i,
                    logit_bias={EOS: 100.0, **NO_LINES}) for i in range(4)]  # fmt: skip
    engine.run()
    for request in requests:
        assert request.finish == "stop"
        content, calls = parse_all(tool_parser(format, plan.parameters), [text_of(request)])
        assert content == ""
        assert calls
        for name, arguments in calls:
            assert name in plan.allowed
            given = json.loads(arguments)
            assert given == {"to": given.get("to")} if name == "count_up" else len(given["at"]) <= 6
    assert hides_marks(format, tokenizer()) == (format == "mistral")


def test_equal_guides_are_compiled_once_and_the_oldest_is_forgotten():
    own = Grammars(tokenizer(), VOCABULARY, most=2)
    first, second, third = (Guide("regex", text, "guided_regex") for text in ("a", "b", "c"))
    one = own.compile(first)
    assert own.compile(first) is one
    own.compile(second)
    own.compile(third)
    assert own.compile(first) is not one
    assert len(own._known) == 2
    own.close()


def test_the_event_loop_goes_on_while_grammars_are_compiled():
    own = Grammars(tokenizer(), VOCABULARY)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    guides = [
        guide_of(guided_json=wide),
        guide_of(guided_json=wide),
        guide_of(guided_regex="a"),
    ]

    async def wait():
        ticks, tasks = 0, [asyncio.ensure_future(own.compiled(guide)) for guide in guides]
        given_up = asyncio.ensure_future(own.compiled(guides[0]))
        await asyncio.sleep(0)
        given_up.cancel()
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            ticks += 1
        return ticks, [task.result() for task in tasks]

    ticks, found = asyncio.run(wait())
    assert found[0] is found[1]
    assert ticks > 1
    own.close()


def test_long_chains_of_references_do_not_end_the_process():
    count = 6000
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": chain | {f"d{count}": {"enum": [7]}}}
    rule = constraint(guided_json=schema)
    assert rule.accept(tokenizer().id("7")) is None
    rules = "".join(f"R{i}:R{i + 1}\n" for i in range(15_000))
    assert constraint(guided_grammar=f"start: R0\n{rules}R15000: /a/").mask().any()
    with pytest.raises(RequestError, match=r"guided_grammar cannot be followed: .*R3000"):
        constraint(guided_grammar="start: R0\n" + "".join(f"R{i}:R{i + 1}\n" for i in range(3000)))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"response_format": 3}, "response_format is 3"),
        ({"response_format": {"type": "jsonschema"}}, r"response_format.type is 'jsonschema' .*json_schema"),
        ({"response_format": {}}, "response_format.type is missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
         "response_format.json_schema.schema cannot be followed: .*objekt"),
        ({"guided_json": {"not": {}}}, "guided_json cannot be followed: .*not"),
        ({"guided_json": {"$ref": "https://example.com/x.json"}}, "guided_json cannot be followed"),
        ({"guided_json": "{"}, "guided_json is not JSON"),
        ({"guided_json": [1]}, "guided_json is .*object"),
        ({"guided_regex": "[0-9"}, "guided_regex cannot be followed: unclosed character class"),
        ({"guided_regex": "(?=a)b"}, "guided_regex cannot be followed: look-around"),
        ({"guided_regex": 3}, "guided_regex is 3"),
        ({"guided_regex": ""}, "guided_regex is ''"),
        ({"guided_regex": "a" * (MOST_CHARACTERS + 1)}, f"guided_regex has {MOST_CHARACTERS + 1} characters"),
        ({"guided_choice": []}, "guided_choice is list of 0"),
        ({"guided_choice": ["a", 3]}, r"guided_choice\[1\] is 3"),
        ({"guided_choice": "ab"}, "guided_choice is str"),
        ({"guided_grammar": "start: what"}, "guided_grammar cannot be followed: .*what"),
        ({"guided_grammar": "no rule at all"}, "guided_grammar cannot be followed"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs has no 'regexp' .*regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex cannot be followed"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex and response_format both"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "both say"),
    ],
)  # fmt: skip
def test_wrong_guides_are_refused_by_the_name_of_their_field(guide, message):
    with pytest.raises(RequestError, match=message):
        grammars().compile(guide_of(**guide))


def test_no_guide_at_all():
    assert read_guide() is None
    assert read_guide(response_format={"type": "text"}, structured_outputs={"regex": None}) is None
    assert read_guide(structured_outputs={"json_object": False}) is None


def nested(levels):
    schema = {"type": "string", "maxLength": 1}
    for _ in range(levels):
        schema = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        }
    return schema


def test_deep_schemas_are_followed_or_refused_with_their_depth():
    deep = constraint(guided_json=nested(55))
    text = '{"a":' * 55 + '"x"' + "}" * 55
    for token in tokenizer().encode(text, special=False):
        assert deep.accept(token) is None
    assert deep.accept(EOS) is None
    for levels in (64, 100, 3000):
        said = f"guided_json is nested {2 * levels + 1} levels deep"
        with pytest.raises(RequestError, match=said):
            constraint(guided_json=nested(levels))
        tool = {"type": "function", "function": {"name": "f", "parameters": nested(levels)}}
        with pytest.raises(
            RequestError, match=rf"tools\[0\].function.parameters is nested {2 * levels + 1}"
        ):
            read_tools([tool])


def test_an_unknown_format_is_an_annotation_and_known_ones_hold():
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "color", "const": "red"},
            "when": {"type": "string", "format": "date"},
            "same": {"const": {"format": "color"}},
        },
        "required": ["format", "when", "same"],
        "additionalProperties": False,
    }
    fits = '{"format":"red","when":"2024-01-31","same":{"format":"color"}}'
    for text, fine in ((fits, True), (fits.replace("2024-01-31", "today"), False)):
        rule = constraint(guided_json=schema)
        errors = [rule.accept(token) for token in tokenizer().encode(text, special=False)]
        assert all(error is None for error in errors) == fine
    for known in FORMATS:
        constraint(guided_json={"type": "string", "format": known})


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def fits(text, **guide):
    rule = constraint(**guide)
    return all(
        rule.accept(token) is None for token in [*tokenizer().encode(text, special=False), EOS]
    )


def test_objects_have_the_properties_that_are_listed_and_no_others():
    within = {"$defs": {"x": OBJECT}, "type": "array", "items": {"$ref": "#/$defs/x"}}
    told = {"additionalProperties": {"type": "string"}}
    for schema, text, fine in (
        (OBJECT, '{"a":1}', True),
        (OBJECT, '{"a":1,"b":"x"}', False),
        (OBJECT | told, '{"a":1,"b":"x"}', True),
        (OBJECT | {"required": ["a", "b"]}, '{"a":1,"b":"x"}', True),  # one that is not listed
        (within, '[{"a":1}]', True),
        (within, '[{"a":1,"b":"x"}]', False),
        ({"anyOf": [OBJECT, {"type": "null"}]}, '{"a":1,"b":"x"}', False),
        ({"type": "object"}, '{"b":"x"}', True),
        ({"const": {"properties": {"a": 1}}}, '{"properties":{"a":1}}', True),
        ({"properties": {"properties": OBJECT}}, '{"properties":{"a":1}}', True),
        # Of two schemas for one object, each would forbid what the other lists.
        ({"allOf": [OBJECT, {"properties": {"b": {}}}]}, '{"a":1,"b":"x"}', True),
        (
            OBJECT | {"anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
            '{"a":1,"b":"x"}',
            True,
        ),
    ):
        assert fits(text, guided_json=schema) == fine, (schema, text)


@pytest.mark.parametrize("guide", [
    {"guided_json": OBJECT}, {"guided_grammar": "start: %json " + json.dumps(OBJECT)},
    {"guided_grammar": 'start: "" %json ' + json.dumps(OBJECT | {"description": "%json {}"}) + " x\nx: \"\""},
    {"response_format": {"type": "json_object"}},
])  # fmt: skip
def test_whitespace_has_an_end(guide):
    for prefix in ("{", '{"a"', '{"a":', '{"a": 1'):
        rule = constraint(**guide)
        for token in tokenizer().encode(prefix, special=False):
            assert rule.accept(token) is None
        newline, space = (tokenizer().encode(each, special=False)[0] for each in "\n ")
        assert rule.accept(newline) is None
        spaces = 0
        while rule.accept(space) is None:
            spaces += 1
            assert spaces <= 20


def test_any_json_object():
    rule = constraint(response_format={"type": "json_object"})
    for token in [*tokenizer().encode('{"a": [1.5e3, null, {"b": "\\n"}]}'), EOS]:
        assert rule.accept(token) is None
    assert rule.finished


@pytest.mark.parametrize("name", ["stories260K", "qwen3"])
def test_real_vocabularies_spell_json_of_any_text(name):
    table = real_tokenizers.load(name)
    own = Grammars(table, vocabulary=table.vocab_size + 70)
    text = '{"a": "Größe 日本 😀 \\n", "b": [true, -1.5e-3]}'
    rule = own.compile(guide_of(guided_json={"type": "object"})).start()
    # Behind something, as an answer is: the first word of a text would get a space of its own.
    ids = table.encode("\n" + text, special=False)[len(table.encode("\n", special=False)) :]
    for token in [*ids, table.eos_ids[0]]:
        allowed = bits_reference(torch.from_numpy(rule.mask())[None], table.vocab_size + 70)[0]
        assert allowed[token]
        assert not allowed[table.vocab_size :].any()
        assert rule.accept(token) is None
    assert rule.finished
    own.close()


def test_requests_in_several_threads_share_a_grammar():
    shared = grammars().compile(guide_of(guided_json=SCHEMA))
    text = '{"kind": "big", "count": 12, "tags": ["a", "bcd"], "open": true}'
    ids = [*tokenizer().encode(text), EOS]

    def follow(_: int) -> bool:
        rule = shared.start()
        return (
            all(rule.mask().any() and rule.accept(token) is None for token in ids) and rule.finished
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(follow, range(40)))
