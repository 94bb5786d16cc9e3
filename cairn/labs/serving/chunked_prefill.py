"""One client sends a long prompt. How long do the answers of the others pause?

    one step    d d d [ PPPPPPPPPPPPPPPPPPPP ] d d d      everybody who decodes waits for the whole prompt
    chunked     d d [PPPP]d [PPPP]d [PPPP]d d d           a pause no longer than one chunk

The engine's own steps are timed: the pause is the longest step in which the others decode.
"""

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import SMALL, ask, drain, small_engine, words
from cairn.labs.workbench import Workbench
from cairn.models.step_cost import SequenceWork, step_cost

DECODERS = 4


def pause(chunk: int, prompt: int, outputs: int) -> tuple[float, float, int]:
    """The longest step while others decode, the time to the long prompt's first token, and its chunks; seconds."""
    engine = small_engine(SMALL, long_prefill_token_threshold=chunk, enable_prefix_caching=False)
    drain(engine, [ask(-1, words(max(chunk, 32), SMALL.vocab, 7), 2)])
    for number in range(DECODERS):
        engine.add(ask(number, words(16, SMALL.vocab, number), outputs))
    for _ in range(4):
        engine.step()
    engine.times.clear()
    long = ask(99, words(prompt, SMALL.vocab, 99), 2)
    engine.add(long)
    engine.run()
    mixed = [step.total for step in engine.times if step.prefill]
    return max(mixed), long.ledger.first_token - long.ledger.arrived, long.ledger.prefill_chunks


@one_thread()
def run(bench: Workbench) -> Outcome:
    prompt = bench.setting("prompt", bench.pick(768, 384))
    chunks = bench.pick((64, 128, 256, 0), (64, 0))
    rows, curve, pauses = [], [], {}
    for chunk in chunks:
        size = chunk or prompt
        bench.step(f"a prompt of {prompt} tokens in chunks of {size}")
        pauses[size], first, counted = pause(chunk, prompt, 2 * (prompt // 64) + 8)
        rows.append([size, counted, pauses[size] * 1e3, first * 1e3])
        curve.append((float(size), pauses[size] * 1e3))
    beside = [SequenceWork(1, 32)] * DECODERS
    whole = step_cost(SMALL, [*beside, SequenceWork(prompt, 0)], 4).flops
    part = step_cost(SMALL, [*beside, SequenceWork(64, prompt - 64)], 4).flops
    return Outcome(
        checks=[
            Check(
                what=Words("chunks of the long prompt", "长 prompt 被切成的块数"),
                predicted=prompt // 64,
                measured=rows[0][1],
                unit="chunks",
            ),
            Check(
                what=Words(
                    "longest pause, whole prompt over chunks of 64", "最长停顿之比：整段 / 64 一块"
                ),
                predicted=whole / part,
                measured=pauses[prompt] / pauses[64],
                unit="x",
                within=0.6,
            ),
        ],
        plots=[_plot(curve)],
        table=Table(
            columns=[
                Words("chunk, tokens", "块大小（token）"),
                Words("chunks", "块数"),
                Words("longest pause, ms", "最长停顿（毫秒）"),
                Words("long prompt's first token, ms", "长 prompt 的首 token（毫秒）"),
            ],
            rows=rows,
        ),
    )


def _plot(curve: Points) -> Plot:
    return Plot(
        title=Words("Longest pause of those who decode", "其他请求的最长停顿"),
        x=Words("tokens of a chunk", "每块 token 数"),
        y=Words("milliseconds", "毫秒"),
        lines={"pause": curve},
        log_x=True,
        log_y=True,
    )


LAB = described(__file__, run)
