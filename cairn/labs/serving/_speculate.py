"""Speculative decoding over the plain model: guess several tokens cheaply, check them all in one pass.

    draft    looks for the last tokens earlier in the text and copies what followed them (prompt lookup)
    verify   one forward pass over the guesses; those that the model would have chosen itself stay, and one more

Greedy, so what comes out is what the model alone would have written. `keep` is the rule for sampling: with it the
tokens have the model's distribution whatever the draft was. Works on one sequence with the model's contiguous cache.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer


class Decoding(NamedTuple):
    tokens: list[int]
    passes: int  # of the model, the prompt's included
    guessed: int
    accepted: int


def lookup(text: Sequence[int], most: int, match: int = 3) -> list[int]:
    """What followed the last occurrence of the text's last `match` tokens (or fewer, down to one)."""
    for length in range(match, 0, -1):
        tail = list(text[-length:])
        for start in range(len(text) - length - 1, -1, -1):
            if list(text[start : start + length]) == tail:
                return list(text[start + length : start + length + most])
    return []


def accepted_of(guesses: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses, from the first on, are what the model has chosen."""
    for place, (guess, own) in enumerate(zip(guesses, chosen, strict=False)):
        if guess != own:
            return place
    return min(len(guesses), len(chosen))


def speculate(model: "Transformer", prompt: Sequence[int], count: int, most: int) -> Decoding:
    """`count` greedy tokens, with up to `most` guesses in a pass; 0 is plain decoding."""
    import torch

    from cairn.models.attend import Cached, KVCache

    cache = KVCache(model.spec, len(prompt) + count + most + 1, torch.float32, "cpu")

    def choose(tokens: Sequence[int]) -> list[int]:
        attend = Cached([cache], [len(tokens)])
        hidden_TD = model(torch.tensor(tokens), attend.positions_T(), attend)
        attend.commit()
        return model.logits(hidden_TD).argmax(-1).tolist()

    with torch.inference_mode():
        text = [*prompt, choose(prompt)[-1]]
        passes, guessed, accepted = 1, 0, 0
        while len(text) - len(prompt) < count:
            guesses = lookup(text, most)[: count - (len(text) - len(prompt)) - 1] if most else []
            chosen = choose([text[-1], *guesses])
            matching = accepted_of(guesses, chosen)
            cache.length -= len(guesses) - matching  # what was guessed wrong is written over
            text += chosen[: matching + 1]
            passes, guessed, accepted = passes + 1, guessed + len(guesses), accepted + matching
    return Decoding(text[len(prompt) :], passes, guessed, accepted)


def expected_tokens(alpha: float, guesses: int) -> float:
    """Tokens of one pass when each guess is right with chance alpha, independently: 1 + a + a^2 + ... + a^k."""
    return sum(alpha**place for place in range(guesses + 1))


def keep(draft_V: "Tensor", target_V: "Tensor", token: int, chance: float, again: float) -> int:
    """The token that is told when the draft has drawn `token`; `chance` and `again` are drawn from 0..1.

    Kept with probability min(1, target / draft); else one is drawn from what the target has in excess. So the result
    has exactly the target's distribution (Leviathan and others, 2023).
    """
    import torch

    if chance * float(draft_V[token]) <= float(target_V[token]):
        return token
    excess_V = (target_V - draft_V).clamp(min=0)
    return int(
        torch.searchsorted(excess_V.cumsum(0) / excess_V.sum(), again).clamp(max=len(excess_V) - 1)
    )
