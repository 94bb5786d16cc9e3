"""The page of an aligning run: how rewards rose, what was sampled, how far trainer and engine were apart."""

from pathlib import Path

from cairn.align.config import Align
from cairn.align.rollout_batches import Round
from cairn.core.config import to_toml
from cairn.report import plot
from cairn.report.page import Markup, element, facts, heading, join, page, table
from cairn.report.plot import Series, chart

FILE = "align.html"
ROUNDS_SHOWN = 8


def write_page(config: Align, rounds: list[Round], last: float) -> Path:
    path = config.folder / FILE
    fresh = path.with_name(f".{FILE}")
    fresh.write_text(render(config, rounds, last), encoding="utf-8")
    fresh.replace(path)
    return path


def render(config: Align, rounds: list[Round], last: float | None) -> str:
    """`last`: held-out reward at the end; None: of a run that goes on, where it was measured last."""
    measured = [one.held_out for one in rounds if one.held_out is not None]
    last = last if last is not None else measured[-1] if measured else 0.0
    summary = {
        "task": config.task.kind,
        "algorithm": config.algorithm.kind,
        "reward": f"{rounds[0].reward:.3f} to {rounds[-1].reward:.3f}" if rounds else "none",
        "held out": f"{measured[0]:.3f} to {last:.3f}" if measured else f"{last:.3f}",
        "answers a round": str(config.data.sequences * config.rollout.updates),
    }
    apart = [one.mismatch for one in rounds if one.mismatch is not None]
    if apart:
        summary["mismatch"] = f"{max(apart):.1e} at most, mean |trainer - engine| of a token"
    return page(
        f"Aligning {config.folder.name}",
        facts(summary),
        heading("Curves"),
        element("div", join(_charts(rounds)), class_="plots"),
        heading("Answers"),
        table(["step", "prompt", "answer", "reward"], _answers(rounds)),
        heading("The recipe"),
        element("pre", to_toml(config)),
        style=plot.STYLE,
    )


def _charts(rounds: list[Round]) -> list[Markup]:
    def of(name: str) -> list[tuple[float, float]]:
        values = ((float(one.step), getattr(one, name)) for one in rounds)
        return [(step, float(value)) for step, value in values if value is not None]

    rewards = [Series("sampled", of("reward")), Series("held out", of("held_out"), "dots")]
    return [
        chart("Reward", rewards, x="step", y="reward"),
        chart("Length", [Series("tokens", of("tokens"))], x="step", y="tokens an answer"),
        chart(
            "Groups whose answers differ",
            [Series("groups", of("informative"))],
            x="step",
            y="groups",
        ),
        chart("Mismatch", [Series("mean", of("mismatch"))], x="step", y="nats a token"),
        chart("Rollouts", [Series("tokens/s", of("tokens_per_s"))], x="step", y="tokens/s"),
    ]


def _answers(rounds: list[Round]) -> list[list[str]]:
    """Sample answers of rounds from the first to the last."""
    every = max(1, len(rounds) // ROUNDS_SHOWN)
    chosen = rounds[::every]
    return [
        [str(one.step), shown.prompt, shown.answer, f"{shown.reward:g}"]
        for one in chosen
        for shown in one.shown
    ]
