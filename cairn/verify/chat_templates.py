"""Other ways to write the conversation of the chat probe: what a server with a wrong template would read. No torch."""

from collections.abc import Iterator, Sequence

from cairn.core.errors import CairnError
from cairn.models.tokenizer import Message, Tokenizer
from cairn.verify.hypotheses import Hypothesis
from cairn.verify.probes import CHAT, CHAT_PROBE

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
ALPACA = (
    "{% for m in messages %}### Instruction:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
OTHERS = {
    "ChatML": CHATML,
    "Llama 2's": LLAMA2,
    "Alpaca's": ALPACA,
    "`User: ... Assistant:`": PLAIN,
}
SYSTEM = "You are a helpful assistant."


def of_template(tokenizer: Tokenizer) -> Iterator[Hypothesis]:
    own = _rendered(tokenizer, CHAT)
    for says, text in _texts(tokenizer, own or ""):
        if text and text != own:
            ids = tokenizer.encode(text, special=False)
            yield _reads(says, ids)
    if own and tokenizer.bos_id is not None:
        ids, bos = tokenizer.encode(own, special=False), tokenizer.bos_id
        if ids[:1] == [bos]:
            yield _reads("the begin-of-text token of the template is missing", ids[1:])
        yield _reads("one begin-of-text token too many before the conversation", [bos, *ids])


def _reads(says: str, ids: list[int]) -> Hypothesis:
    return Hypothesis("chat template", says, "template", probe=CHAT_PROBE, ids=lambda _: ids)


def _texts(tokenizer: Tokenizer, own: str) -> Iterator[tuple[str, str | None]]:
    yield "no generation prompt at the end", _rendered(tokenizer, CHAT, prompt=False)
    yield "white space at the end is stripped", own.rstrip()
    yield "white space at the start is stripped", own.lstrip()
    system = [{"role": "system", "content": ""}, *CHAT]
    yield "an empty system message", _rendered(tokenizer, system)
    default = [{"role": "system", "content": SYSTEM}, *CHAT]
    yield f"a system message {SYSTEM!r}", _rendered(tokenizer, default)
    yield "the system message of the template is missing", _without_system(own)
    yield "the message alone, without any template", str(CHAT[-1]["content"])
    for name, source in OTHERS.items():
        text = _rendered(tokenizer, CHAT, source=source) or ""
        yield f"the template {name}", text
        if text != text.rstrip():  # Jinja drops a line break at the end of a template's file
            yield f"the template {name} without the line break at its end", text.rstrip()


def _without_system(own: str) -> str | None:
    """The prompt without the template's default system message, from the first user turn on."""
    at = own.find("user")
    opening = own.rfind("<", 0, at)
    return own[opening:] if at > 0 and opening > 0 else None


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    prompt: bool = True,
    source: str | None = None,
) -> str | None:
    templates = tokenizer.templates if source is None else tokenizer.templates.replaced(source)
    try:
        return templates.render(messages, None, prompt)
    except CairnError:  # a template that takes no system message, or a model without one
        return None
