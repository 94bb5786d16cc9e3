"""Requests that somebody wrote to do harm: none is a server error, and none stops the event loop.

Bytes that are no HTTP, bodies that lie about their length, JSON that is deep, wide or not JSON, wrong types for every
endpoint, paths that lead elsewhere, and inputs whose work grows with their size. How long the loop is stopped is
measured as CPU time of its thread between two of its turns, so that a busy machine changes nothing.
"""

import asyncio
import gc
import gzip
import json
import socket
import time
from contextlib import suppress
from urllib.parse import quote

import live_server
import pytest
from valid_bodies import VALID

from cairn.serve.http.server.paths import PATHS

pytestmark = pytest.mark.timeout(60)
MOST_STOPPED_S, ATTEMPTS = 0.1, 3
MIB = 1 << 20
GARBAGE = [
    # Not JSON, or JSON of another kind.
    b"",
    b" ",
    b"null",
    b"true",
    b"0",
    b'"text"',
    b"[]",
    b"[[]]",
    b"{",
    b"}",
    b"{}{}",
    b"{,}",
    b'{"a"}',
    b'{"a":}',
    b"\xff\xfe{}",
    b'\xef\xbb\xbf{"prompt": "x"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b"\0" * 64,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b'{"prompt": 1e999}',
    b'{"prompt": -}',
    b'{"prompt": 0x10}',
    b'{"prompt": "x", "prompt": 5}',
    b'{"": ""}',
    b'{"__proto__": {}, "constructor": 1}',
    gzip.compress(b"{}"),
    # Deep, wide and long.
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"input":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    b'{"prompt": ' + b"9" * 100_000 + b"}",
    b'{"max_tokens": ' + b"9" * 400 + b"}",
    b'{"n": 1e400}',
    b"{" + b",".join(b'"k%d": 0' % i for i in range(50_000)) + b"}",
]
# One field of a valid body of the path; the value is what somebody hopes nobody has thought of.
ODD_FIELDS = (
    [
        ("/v1/completions", "prompt", value)
        for value in (
            "",
            [],
            [[]],
            [""],
            [[], []],
            [None],
            [-1],
            [2**31],
            [2**70],
            [1.5],
            [True],
            ["a", 1],
            {"a": 1},
            "\0",
            "\U0010ffff" * 9,
            "\ud7ff",
            [5] * 200_000,
            [[5]] * 5_000,
            ["x"] * 100_000,
            "x" * (4 * MIB),
            "\n" * MIB,
            "é" * MIB,
            "<|begin|>" * 200_000,
        )
    ]
    + [
        ("/v1/completions", name, value)
        for name, value in (
            ("max_tokens", -1),
            ("max_tokens", 2**31),
            ("max_tokens", 2**63),
            ("max_tokens", 0.5),
            ("n", 0),
            ("n", 10**6),
            ("n", -1),
            ("temperature", -1),
            ("temperature", 1e308),
            ("temperature", "nan"),
            ("top_p", 0),
            ("top_p", 2),
            ("top_k", -2),
            ("min_p", -0.1),
            ("seed", 2**64),
            ("seed", -(2**63)),
            ("stop", ["a"] * 10_000),
            ("stop", ["x" * MIB]),
            ("stop", [""]),
            ("stop_token_ids", [5] * 500_000),
            ("stop_token_ids", [-1]),
            ("stop_token_ids", [2**31]),
            ("logit_bias", {str(i): 1 for i in range(151_936)}),
            ("logit_bias", {"9" * 100: 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"5": 101}),
            ("logit_bias", {"١": 1}),
            ("logprobs", 10**9),
            ("prompt_logprobs", 21),
            ("echo", "x"),
            ("best_of", 10**9),
            ("suffix", "x" * MIB),
            ("cache_salt", "x" * MIB),
            ("cache_salt", "\ud800"),
            ("priority", 2**70),
            ("priority", 2**63 - 1),
            ("model", "x" * MIB),
            ("model", "../../etc/passwd"),
            ("model", "tiny\0"),
            ("model", ""),
            ("truncate_prompt_tokens", -2),
            ("truncate_prompt_tokens", 2**40),
            ("stream_options", {"include_usage": 1}),
            ("guided_regex", "(a|a)*" * 50 + "b"),
            ("guided_regex", "(((((a*)*)*)*)*)*b"),
            ("guided_regex", "a{1000000}"),
            ("guided_regex", "("),
            ("guided_regex", "[" + "a-z" * 10_000 + "]"),
            ("guided_regex", "(" * 5_000 + ")" * 5_000),
            ("guided_grammar", "start: start"),
            ("guided_grammar", "x" * 300_000),
            ("guided_choice", ["a"] * 20_000),
            ("guided_choice", ["x" * MIB]),
            ("guided_json", {"$ref": "#"}),
            ("guided_json", {"$ref": "http://127.0.0.1:1/x"}),
            ("guided_json", {"$ref": "file:///etc/passwd"}),
            ("guided_json", {"enum": list(range(50_000))}),
            ("guided_json", {"type": "string", "pattern": "(a+)+$"}),
            ("guided_json", {"minItems": 10**9, "type": "array"}),
            ("grammar", "root ::= root"),
            ("json_schema", {"allOf": [{"$ref": "#"}]}),
            ("user", "x" * MIB),
            ("structured_outputs", {"json": {"properties": {str(i): {} for i in range(500)}}}),
            ("response_format", {"type": []}),
        )
    ]
    + [
        ("/v1/chat/completions", name, value)
        for name, value in (
            ("messages", []),
            ("messages", [{}]),
            ("messages", "x"),
            ("messages", [None]),
            ("messages", [[]]),
            ("messages", [{"role": "user", "content": "x"}] * 50_000),
            ("messages", [{"role": "user", "content": "x" * (4 * MIB)}]),
            ("messages", [{"role": "\0", "content": "x"}]),
            ("messages", [{"role": "user", "content": None}]),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]),
            (
                "messages",
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
                        ],
                    }
                ],
            ),
            (
                "messages",
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
                        ],
                    }
                ],
            ),
            (
                "messages",
                [
                    {
                        "role": "user",
                        "content": [{"type": "input_audio", "input_audio": {"data": "x"}}],
                    }
                ],
            ),
            (
                "messages",
                [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 50_000}}],
                    }
                ],
            ),
            ("messages", [{"role": "tool", "tool_call_id": "x" * MIB, "content": "x"}]),
            ("tools", [{"type": "function", "function": {"name": "x" * MIB}}]),
            ("tools", [{}]),
            ("tools", [None]),
            ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5_000)]),
            ("tool_choice", "x" * MIB),
            ("tool_choice", {"type": "function", "function": {"name": "x" * MIB}}),
            ("chat_template", "{% for i in range(10**9) %}{% endfor %}"),
            ("chat_template", "{{ ''.__class__ }}"),
            ("chat_template_kwargs", {"x" * MIB: 1}),
            ("chat_template_kwargs", {"messages": []}),
            ("documents", [{}] * 100_000),
            ("reasoning_effort", "x" * MIB),
            ("modalities", ["x" * MIB]),
            ("response_format", {"type": "x" * MIB}),
            ("top_logprobs", 3),
            ("metadata", {str(i): "x" for i in range(100_000)}),
            ("functions", [{}]),
        )
    ]
    + [
        ("/v1/messages", name, value)
        for name, value in (
            ("max_tokens", 0),
            ("system", [{"type": "text", "text": 5}]),
            ("messages", [{"role": "x" * MIB, "content": "x"}]),
            ("stop_sequences", ["x"] * 10_000),
            ("thinking", {"type": "enabled", "budget_tokens": -1}),
            ("tools", [{"name": "f", "input_schema": {"$ref": "#"}}]),
            ("tool_choice", {"type": "tool", "name": "x" * MIB}),
            (
                "messages",
                [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": [[]]}],
                    }
                ],
            ),
        )
    ]
    + [
        ("/v1/responses", name, value)
        for name, value in (
            ("input", []),
            ("input", [{}] * 50_000),
            ("input", [{"type": "x" * MIB}]),
            ("previous_response_id", "x" * MIB),
            ("previous_response_id", "../../etc/passwd"),
            ("metadata", {"x": "y" * MIB}),
            ("truncation", "auto"),
            ("instructions", "x" * MIB),
            ("text", {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}),
            ("input", [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "x"}]),
            ("tools", [{"type": "mcp"}]),
            ("include", ["x" * MIB]),
            ("reasoning", {"effort": "x" * MIB}),
            ("max_output_tokens", -1),
        )
    ]
    + [
        ("/v1/embeddings", name, value)
        for name, value in (
            ("input", ["x"] * 50_000),
            ("input", [[5] * 100_000]),
            ("dimensions", 0),
            ("dimensions", 2**40),
            ("encoding_format", "x"),
        )
    ]
    + [
        ("/rerank", "texts", ["x"] * 50_000),
        ("/v1/rerank", "documents", []),
        ("/v1/rerank", "top_n", -1),
        ("/score", "text_2", [[]]),
        ("/tokenize", "prompt", "x" * (4 * MIB)),
        ("/tokenize", "prompt", "a b " * MIB),
        ("/detokenize", "tokens", [5] * MIB),
        ("/detokenize", "tokens", [-1]),
        ("/detokenize", "tokens", [2**70]),
        ("/detokenize", "tokens", ["x"]),
        ("/completion", "prompt", {"x": 1}),
        ("/completion", "n_predict", -(2**40)),
        ("/completion", "grammar", "root ::= " + "(" * 9_000),
        ("/completion", "n_probs", 10**6),
        ("/completion", "t_max_predict_ms", -1),
        ("/completion", "stop", [5]),
        ("/infill", "input_prefix", "x" * (4 * MIB)),
        ("/infill", "input_extra", [{}] * 10_000),
        ("/apply-template", "messages", [[]]),
        ("/api/chat", "options", {"num_ctx": -1, "temperature": "x"}),
        ("/api/chat", "format", "[" * 1000),
        ("/api/chat", "keep_alive", []),
        ("/api/generate", "options", []),
        ("/api/generate", "images", ["x" * MIB]),
        ("/api/generate", "context", [-1] * 100_000),
        ("/api/embed", "input", [""] * 10_000),
        ("/api/show", "model", "x" * MIB),
        ("/api/show", "model", "../../../etc/passwd"),
        ("/v1/load_lora_adapter", "lora_path", "/etc/passwd"),
        ("/v1/load_lora_adapter", "lora_path", "\0"),
        ("/v1/load_lora_adapter", "lora_path", "x" * 100_000),
        ("/v1/unload_lora_adapter", "lora_name", "x" * 200),
        ("/update_weights", "source", "/dev/zero"),
        ("/update_weights", "source", "\0"),
        ("/update_weights", "version", 2**62 + 1),
        ("/cairn/role", "prefill_urls", ["http://169.254.169.254/"]),
        ("/cairn/role", "timeout_s", 1e300),
        ("/pause", "keep", "x"),
        ("/v1/batches", "input_file_id", "../../../etc/passwd"),
        ("/v1/batches", "endpoint", "/v1/files"),
        ("/v1/batches", "metadata", {str(i): "x" for i in range(100_000)}),
        ("/v1/batches", "completion_window", "x" * MIB),
    ]
)
BASE = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": []},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/absent"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/update_weights": {"version": 1, "source": "/absent"},
    "/cairn/role": {"role": "both"},
    "/pause": {},
    "/api/show": {},
    "/v1/batches": {
        "input_file_id": "file-x",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "/completion": {"prompt": "Hi", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"model": "tiny", "prompt": "Hi"},
    "/api/embed": {"model": "tiny", "input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
} | dict(reversed(VALID))
TARGETS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1/files/..%2f..%2fetc%2fpasswd",
    "/v1/files/%2e%2e",
    "/v1/files/%00",
    "/v1/files/file-x%00.data/content",
    "/v1/files/" + "x" * 30_000,
    "/v1/batches/..%2f..",
    "/v1/responses/..%2f",
    "/v1/responses/%00",
    "/v1/responses/" + "x" * 30_000,
    "/v1/responses/x/input_items?limit=-1",
    "/v1/responses/x/input_items?after=%00&limit=1e9",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/v1/models/" + "a/" * 10_000,
    "/v1/models/%ff%fe",
    "/cairn/requests?limit=1000",
    "/cairn/requests?limit=99999999999999999999",
    "/cairn/requests?limit=-1",
    "/cairn/requests?limit=nan",
    "/cairn/requests?order=x",
    "/cairn/requests?" + "limit=1&" * 5_000,
    "/cairn/requests?" + "a" * 50_000,
    "/cairn/requests/..%2f",
    "/cairn/requests/x/trace",
    "/cairn/trace?seconds=nan",
    "/cairn/trace?seconds=inf",
    "/cairn/trace?seconds=-1",
    "/cairn/trace?seconds=" + "9" * 5_000,
    "/v1/files?limit=0",
    "/v1/files?limit=x&after=y",
    "/v1/batches?limit=100000000",
    "/health?" + "x" * 50_000,
    "/metrics?x[]=1",
    "/" + "v1/" * 10_000,
    "/" + "%41" * 10_000,
    "//v1//models",
    "/v1/models?" + "&" * 50_000,
    "/V1/MODELS",
    "/v1/models/",
    "/.git/config",
    "/v1/chat/completions/../../health",
    "/?" + quote("<script>"),
    "/docs/..;/",
    "/static/..%5c..%5c",
    "/api/blobs/sha256:" + "0" * 64,
    "/is_sleeping?x=%ff",
    "/props?x=1",
    "/slots?fail_on_no_slot=1",
    "/openapi.json?x",
]
HEAD = b"Host: 127.0.0.1\r\n"
LINE = b"POST /v1/completions HTTP/1.1\r\n" + HEAD
RAW = [
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\n" + HEAD + b"\r\n",
    b"\0" * 1000,
    b"\xff" * 1000,
    b"GET  /health  HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: x\n\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /he\0alth HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET http://example.com/health HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"CONNECT example.com:443 HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"TRACE / HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"x" * MIB,
    b"GET /" + b"x" * MIB + b" HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * MIB + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n"
    + HEAD
    + b"".join(b"X-%d: y\r\n" % i for i in range(20_000))
    + b"\r\n",
    b"GET /health HTTP/1.1\r\n" + HEAD + b"no colon here\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HEAD + b": no name\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HEAD + b"X: a\0b\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HEAD + b"X: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\n"
    + HEAD
    + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
    LINE + b"Content-Length: -1\r\n\r\n{}",
    LINE + b"Content-Length: x\r\n\r\n{}",
    LINE + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n{}",
    LINE + b"Content-Length: 1\r\n\r\n{}",
    LINE + b"Content-Length: 1000\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    LINE + b"Content-Length: 99999999999\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\nx\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n{}",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}",
    LINE + b"Transfer-Encoding: gzip\r\n\r\n{}",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n",
    LINE + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    LINE + b"Expect: 100-continue\r\n\r\n",
    LINE + b"Content-Length: 2\r\nExpect: the impossible\r\n\r\n{}",
    LINE + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-request-id: " + b"a" * 10_000 + b"\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-request-id: \xff\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-cairn-continue: 2\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-cairn-continue: -2\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-cairn-continue: " + b"9" * 5000 + b"\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\ntraceparent: \xff\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nx-cairn-router: 1\r\nx-cairn-ledger: \xff\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nAuthorization: Bearer " + b"x" * 50_000 + b"\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nAuthorization: \xff\xfe\r\n\r\n{}",
    LINE + b"Content-Length: 2\r\nContent-Type: \xff\r\n\r\n{}",
    (LINE + b"Content-Length: 2\r\n\r\n{}") * 200,
]
FORM = "multipart/form-data; boundary=b"
FORMS = [
    ("text/plain", b"x"),
    ("multipart/form-data", b"--b--"),
    (FORM, b""),
    (FORM, b"--b"),
    (FORM, b"--b--"),
    (FORM, b"--b\r\n--b--"),
    (FORM, b"--b\r\n" * 200_000),
    (FORM, b"--b\r\n\r\nx\r\n--b--"),
    (f"{FORM}; charset=\0", b"--b--"),
    ("multipart/form-data; boundary=" + "b" * 10_000, b"--b--"),
    (FORM, b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--"),
    (
        FORM,
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="../../x"\r\n\r\n\xff\r\n--b--',
    ),
    (
        FORM,
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
        b'name="file"; filename="' + b"x" * MIB + b'"\r\n\r\nx\r\n--b--',
    ),
    (
        FORM,
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
        + b"x" * MIB
        + b"\r\n--b--",
    ),
    (FORM, b"--b\r\n" + b"X: y\r\n" * 200_000 + b"\r\nx\r\n--b--"),
]


class LoopWatch:
    """The longest time that the loop's thread has computed between two turns of the loop."""

    def __init__(self, server):
        self._longest, self._last = 0.0, None
        loop = server.service._waker._loop
        self._loop = loop
        loop.call_soon_threadsafe(self._turn)

    def _turn(self):
        now = time.thread_time()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        self._loop.call_later(0.001, self._turn)

    def taken(self):
        """Since the last call, turns that end now included."""

        async def turns():
            for _ in range(3):
                await asyncio.sleep(0.002)
            longest, self._longest = self._longest, 0.0
            return longest

        return asyncio.run_coroutine_threadsafe(turns(), self._loop).result(60)


@pytest.fixture(scope="module")
def target(agent_folder, tmp_path_factory):
    settings = dict(
        max_request_tokens=2, num_gpu_blocks_override=512, admin_endpoints=True, store_responses=8
    )
    folder = tmp_path_factory.mktemp("batches")
    with live_server.live(agent_folder, batch_folder=folder, body_timeout=2.0, **settings) as made:
        made.http.post("/v1/completions", json={"prompt": "Hi"})  # what is done once is done
        made.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}
        )
        made.http.post("/v1/completions", json={"prompt": "Hi", "guided_regex": "a"})
        made.http.get("/openapi.json")
        gc.collect()
        gc.freeze()  # as `cairn serve` does: a collection that looks at torch takes longer than any request
        made.watch = LoopWatch(made)
        made.watch.taken()
        yield made
        gc.unfreeze()
        made.http.post("/resume")
        made.at_rest()
        assert made.service.health().status == "ok"


def check(target, what, send):
    """`send` gives statuses and what it got. A stop is counted if it happens each time: memory and caches that a busy
    machine shares make a thread slower, too."""
    for _ in range(ATTEMPTS):
        target.watch.taken()
        statuses, got = send()
        stopped_s = target.watch.taken()
        assert max(statuses, default=0) < 500, (what, got)
        if stopped_s < MOST_STOPPED_S:
            return got
    raise AssertionError((what, f"the loop was stopped for {stopped_s * 1000:.0f} ms"))


def posted(target, path, body, headers=None):
    response = target.http.post(path, content=body, headers=headers)
    return [response.status_code], response


def raw(server, data):
    """The statuses of whatever comes back; none where the connection is closed without an answer."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as link:
        with suppress(OSError):  # it may be refused while it is sent
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
        got = b""
        with suppress(ConnectionError):
            while piece := link.recv(1 << 16):
                got += piece
    lines = [line for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(line.split(b" ")[1]) for line in lines]


def test_there_are_enough_of_them():
    assert len({*GARBAGE}) + len(ODD_FIELDS) + len({*TARGETS}) + len({*RAW}) + len(FORMS) >= 200


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_request(target, data):
    check(target, data[:200], lambda: (raw(target, data), ""))


@pytest.mark.parametrize("path", TARGETS, ids=range(len(TARGETS)))
def test_paths_that_lead_elsewhere(target, path):
    for method in (b"GET", b"DELETE"):
        data = b"%b %b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % (
            method,
            path.encode(),
        )
        check(target, path[:100], lambda data=data: (raw(target, data), ""))


POSTS = sorted({path for method, path, _ in PATHS if method == "POST" and "{" not in path})
STAYS_AWAY = ("/sleep", "/wake_up", "/resume", "/reset_prefix_cache")  # that need no body
JSON_POSTS = [path for path in POSTS if path not in STAYS_AWAY]


@pytest.mark.parametrize("path", JSON_POSTS)
def test_bodies_that_are_no_request(target, path):
    for body in GARBAGE:
        response = check(target, (path, body[:100]), lambda body=body: posted(target, path, body))
        if response.status_code == 200:
            assert path == "/pause", (path, body[:100])
            target.http.post("/resume")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    ODD_FIELDS,
    ids=[f"{path}-{field}-{at}" for at, (path, field, _) in enumerate(ODD_FIELDS)],
)
def test_fields_that_are_meant_to_harm(target, path, field, value):
    body = json.dumps(BASE[path] | {field: value}).encode("utf-8", "surrogatepass")
    response = check(target, (path, field, str(value)[:80]), lambda: posted(target, path, body))
    if response.status_code >= 400:
        assert len(response.content) < 4096, "the answer repeats what was sent"


@pytest.mark.parametrize("at", range(len(FORMS)))
@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/transcriptions"])
def test_forms_that_are_none(target, path, at):
    kind, body = FORMS[at]
    headers = {"content-type": kind.encode("latin-1")} if "\0" not in kind else {}
    check(target, (path, kind[:80], body[:80]), lambda: posted(target, path, body, headers))
