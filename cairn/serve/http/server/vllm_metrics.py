"""The few metrics that routers read from vLLM, under its names, so that llm-d and gateways can stand in front of us."""

from collections.abc import Mapping

from cairn.serve.engine.messages import Stats
from cairn.serve.engine.request import Limits


def vllm_text(model: str, stats: Stats, limits: Limits) -> str:
    """vLLM's metrics in Prometheus' text format, appended to Cairn's own."""
    used = stats.pages_used / max(stats.pages, 1)
    labels = f'engine="0",model_name="{_escaped(model)}"'
    pages = f'block_size="{limits.page_size}",num_gpu_blocks="{limits.pages - 1}",engine="0"'
    gauges = {
        f"num_requests_running{{{labels}}}": stats.running,
        f"num_requests_waiting{{{labels}}}": stats.waiting,
        f"kv_cache_usage_perc{{{labels}}}": round(used, 6),  # a share, whatever its name says
        f"cache_config_info{{{pages}}}": 1,
    }
    counters = {
        f"prefix_cache_queries_total{{{labels}}}": stats.prefix_tokens,
        f"prefix_cache_hits_total{{{labels}}}": stats.prefix_hits,
    }
    return _lines("gauge", gauges) + _lines("counter", counters)


def _lines(kind: str, values: Mapping[str, float]) -> str:
    return "".join(
        f"# TYPE vllm:{name.partition('{')[0]} {kind}\nvllm:{name} {value}\n"
        for name, value in values.items()
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
