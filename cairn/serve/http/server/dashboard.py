"""The server's metrics as a Grafana dashboard: which stand together, and in which order.

`cairn metrics grafana` prints it; `deploy/grafana/cairn.json` is that output. What a panel asks is made from the
catalogue in `counts`.
"""

from typing import Any

import msgspec

from cairn.core.grafana import PanelRow, dashboard
from cairn.serve.http.server.metric_catalogue import CATALOGUE_HTTP

ROWS = (
    PanelRow("Requests", (
        "cairn_http_requests_total", "cairn_finished_requests_total", "cairn_open_requests",
    )),
    PanelRow("Latency", (
        "cairn_time_to_first_token_seconds", "cairn_time_per_output_token_seconds", "cairn_inter_token_seconds",
        "cairn_request_seconds", "cairn_request_phase_seconds",
    )),
    PanelRow("Tokens", (
        "cairn_prompt_tokens_total", "cairn_cached_prompt_tokens_total", "cairn_generated_tokens_total",
    )),
    PanelRow("Keys", (
        "cairn_key_tokens_total", "cairn_key_device_seconds_total", "cairn_key_joules_total",
        "cairn_event_loop_lag_seconds",
    )),
    PanelRow("Engine", (
        "cairn_running_requests", "cairn_waiting_requests", "cairn_preempted_requests_total", "cairn_engine_steps",
        "cairn_engine_seconds_total", "cairn_remote_prompts_total", "cairn_fallback_prompts_total",
        "cairn_weights_bytes",
        "cairn_spec_decode_num_drafts_total", "cairn_spec_decode_num_draft_tokens_total",
        "cairn_spec_decode_num_accepted_tokens_total", "cairn_spec_decode_num_accepted_tokens_per_pos_total",
        "cairn_media_pictures_total", "cairn_media_tower_seconds_total",
    )),
    PanelRow("Cache", (
        "cairn_cache_used_pages", "cairn_cache_findable_pages", "cairn_cache_pages",
        "cairn_prefix_looked_up_tokens_total", "cairn_prefix_found_tokens_total",
        "cairn_offload_pages", "cairn_offload_loaded_tokens_total", "cairn_offload_failed_loads_total",
    )),
)  # fmt: skip


def server_dashboard() -> dict[str, Any]:
    return dashboard(CATALOGUE_HTTP, ROWS, "Cairn", "cairn-serve")


def dashboard_text() -> str:
    """The dashboard as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(server_dashboard()), indent=2).decode() + "\n"
