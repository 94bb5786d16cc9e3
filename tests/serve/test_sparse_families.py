"""DeepSeek and gpt-oss through the engine: pages, prefix cache and chunks change no token."""

import pytest
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

FAMILIES = ("deepseek_v2-groups", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "switches",
    [{"chunked": True, "tight": True}, {"plain": True}, {"invariant": True}],
    ids=["chunked-tight", "plain", "invariant"],
)
def test_the_engine_answers_as_the_contiguous_reference(family, switches):
    shared = prompt_of(34, 1)  # two full pages, which the prefix cache finds again
    prompts = [shared, [*shared, 5, 6], prompt_of(3, 2), shared]
    engine = tiny_engine(family, **switches)
    for again in (prompts, prompts[:2]):
        requests = submit(engine, again)
        engine.run()
        assert [r.outputs for r in requests] == [greedy(family, prompt) for prompt in again]
    at_rest(engine)
