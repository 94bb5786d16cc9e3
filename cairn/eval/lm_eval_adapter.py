"""Cairn under lm-eval's own harness, with all of its tasks. Importable only where the package lm_eval is installed.

from lm_eval import simple_evaluate
from cairn.eval.lm_eval_adapter import CairnLM

simple_evaluate(CairnLM("Qwen/Qwen3-0.6B"), tasks=["hellaswag"])
lm_eval --model cairn --model_args pretrained=Qwen/Qwen3-0.6B      once this module is imported
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance  # pyrefly: ignore[missing-import]
from lm_eval.api.model import LM  # pyrefly: ignore[missing-import]
from lm_eval.api.registry import register_model  # pyrefly: ignore[missing-import]

from cairn.core.errors import ConfigError
from cairn.eval.local_model import LocalModel
from cairn.eval.requests import MAX_TOKENS, GenerateUntil, LogLikelihood, Rolling

# Names under which tasks give the length of an answer, the first that is there counts.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("cairn")
class CairnLM(LM):
    def __init__(self, pretrained: str, batch_size: Any = None, **options: Any) -> None:
        """`options` are those of `LocalModel`; `batch_size` is lm-eval's, and Cairn packs by tokens instead."""
        super().__init__()
        self.model = LocalModel(pretrained, **options)

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        found = self.model.loglikelihood([LogLikelihood(*request.args) for request in requests])
        return [(one.logprob, one.greedy) for one in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        found = self.model.rolling([Rolling(request.args[0]) for request in requests])
        return [sum(window.logprob for window in windows) for windows in found]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return self.model.generate_until([_generation(*request.args) for request in requests])

    @property
    def tokenizer_name(self) -> str:
        return self.model.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.model.tokenizer.templates.sources.get("default", "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.model.tokenizer.chat(chat_history, None, add_generation_prompt)


def _generation(context: str, options: dict[str, Any]) -> GenerateUntil:
    if options.get("do_sample") and options.get("temperature", 1.0) > 0:
        raise ConfigError(
            f"a task asks for sampled answers: {options}",
            hint="Cairn evaluates greedily; set do_sample to false in the task",
        )
    until = options.get("until") or ()
    length = next((options[name] for name in LENGTHS if options.get(name)), MAX_TOKENS)
    stops = (until,) if isinstance(until, str) else tuple(until)
    return GenerateUntil(context, stops, int(length))
