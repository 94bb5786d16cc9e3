"""Pre-tokenizers by their names in GGUF files.

GGUF stores a byte-level vocabulary and its merges, but the way words are cut only as a name in tokenizer.ggml.pre.
These are the published patterns behind the names. A wrong one gives wrong ids without any error, so a name that is
not here is refused. This module knows nothing about vocabularies.
"""

from typing import NamedTuple

from cairn.core.errors import TokenizerError


class PreTokenizer(NamedTuple):
    """Patterns are applied one after the other, each to the pieces that the one before has cut."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever the merges say
    add_bos: bool = False  # where the file does not say
    compose: bool = False  # Unicode NFC first


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # one character before a word, such as a space
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CJK_OLD = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_NEW = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# The letters of scripts with case, as DeepSeek LLM lists them. By number: some of these signs turn into others when a
# text editor normalises Unicode.
_CASED_LETTERS = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
    104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"


def _character_class(ranges: str) -> str:
    """'41-5A B5' as the inside of a class in Oniguruma's notation."""
    spans = [span.split("-") for span in ranges.split()]
    return "".join("-".join(f"\\x{{{end}}}" for end in span) for span in spans)


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3_WORDS = "|".join([_CONTRACTIONS, _LEAD + r"\p{L}+", r"\p{N}{1,3}", _SIGNS, _SPACES])
_QWEN2_WORDS = "|".join([_CONTRACTIONS, _LEAD + r"\p{L}+", r"\p{N}", _SIGNS, _SPACES])
_QWEN35_WORDS = "|".join(
    [_CONTRACTIONS, _LEAD + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]
)
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_WORDS = (f"{_LEAD}{_UPPER}*{_LOWER}+", f"{_LEAD}{_UPPER}+{_LOWER}*")
_TEKKEN_WORDS = "|".join([*_CASED_WORDS, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES])
_GPT4O_WORDS = "|".join(
    [
        *(f"{word}{_CONTRACTIONS}?" for word in _CASED_WORDS),
        r"\p{N}{1,3}",
        _SIGNS_AND_SLASHES,
        _SPACES,
    ]
)
_DEEPSEEK3_WORDS = "|".join(
    [
        _ASCII_PUNCTUATION + "[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    ]
)

_GPT2 = PreTokenizer((_GPT2_WORDS,))
_GPT_NEOX = PreTokenizer((_GPT2_WORDS,), compose=True)
_DIGITS_APART = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_WORDS,), compose=True)
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK_NEW, _DEEPSEEK3_WORDS))
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_character_class(_CASED_LETTERS)}]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK_OLD,
    r"\p{N}+",
)

PRETOKENIZERS = {
    # Compared with expected ids, or with the ids of the original tokenizer.
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_WORDS,)),
    "tekken": PreTokenizer((_TEKKEN_WORDS,), whole_words=True, add_bos=True),
    "deepseek-v3": _DEEPSEEK3,
    "smollm": _DIGITS_APART,
    # Not contradicted by expected ids; their vocabularies were not at hand.
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART._replace(compose=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OLD, r"\p{N}")),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    # As llama.cpp has them.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "phi-2": _GPT2,
    **dict.fromkeys(("mpt", "olmo"), _GPT_NEOX),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3_WORDS,))),
    "deepseek-r1-qwen": _QWEN2._replace(compose=False),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenizer((_GPT4O_WORDS,))),
    "hunyuan-dense": _DEEPSEEK3,
}


def pretokenizer(name: str) -> PreTokenizer:
    try:
        return PRETOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRETOKENIZERS))
        raise TokenizerError(
            f"the GGUF file cuts words by the rule {name!r}, which is not known here",
            hint=f"take the tokenizer from the model's original folder; known rules: {known}",
        ) from None
