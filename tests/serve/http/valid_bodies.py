"""A valid body for each way to use each endpoint, and values that are odd nearly everywhere: fuzzing starts here."""

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
SHAPE = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Hi"}
SAMPLING = {
    "model": "tiny",
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["x", "yy"],
    "stop_token_ids": [5],
    "logit_bias": {"7": 1.5},
    "min_tokens": 1,
    "max_tokens": 2,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "priority": 1,
    "cache_salt": "s",
    "return_token_ids": True,
    "user": "me",
}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
VALID = [
    ("/v1/completions", {"prompt": "Hi", **SAMPLING, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["Hi", "you"], "max_tokens": 1, "best_of": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 0, "echo": True, "logprobs": 0}),
    (
        "/v1/completions",
        {
            "prompt": [5, 6],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": "Hi you",
            "truncate_prompt_tokens": 1,
            "add_special_tokens": False,
            "max_tokens": 1,
        },
    ),
    ("/v1/completions", {"prompt": "Hi", "guided_regex": "[ab]{1,3}", "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "guided_choice": ["a", "b"], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "guided_grammar": 'start: "a" | "b"', "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "guided_json": SHAPE, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "Hi", "structured_outputs": {"json": SHAPE}, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [USER], **SAMPLING, "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": [{"type": "text", "text": "Be"}]}, USER],
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 2},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SHAPE},
            },
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "a", "text": "b"}],
            "add_generation_prompt": True,
            "max_tokens": 2,
        },
    ),
    (
        "/v1/rerank",
        {
            "model": "tiny",
            "query": "Hi",
            "documents": ["you", {"text": "me"}],
            "top_n": 1,
            "return_documents": False,
            "instruction": "x",
            "truncate_prompt_tokens": 5,
            "priority": 1,
        },
    ),
    ("/rerank", {"query": "Hi", "texts": ["you", "me"], "truncate": True, "return_text": True}),
    ("/embed", {"inputs": [[5, 6], [7]], "truncate": True, "normalize": False}),
    (
        "/v2/embed",
        {
            "model": "tiny",
            "texts": ["Hi", "you"],
            "input_type": "search_query",
            "embedding_types": ["float", "ubinary", "base64"],
            "output_dimension": 8,
            "max_tokens": 5,
            "truncate": "START",
            "priority": 1,
        },
    ),
    ("/v2/rerank", {"model": "tiny", "query": "Hi", "documents": ["you", "me"], "top_n": 1}),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": "Hi"}]}]}),
    ("/score", {"text_1": "Hi", "text_2": ["you", "me"], "truncate_prompt_tokens": -1}),
    (
        "/v1/embeddings",
        {
            "model": "tiny",
            "input": ["Hi", "you"],
            "encoding_format": "base64",
            "dimensions": 4,
            "pooling": "last",
            "priority": 1,
            "add_special_tokens": True,
        },
    ),
    ("/v1/embeddings", {"input": [[5, 6], [7]]}),
    (
        "/v1/responses",
        {
            "model": "tiny",
            "input": "Hi",
            "instructions": "Be",
            "max_output_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
            "truncation": "auto",
            "priority": 1,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": SHAPE}],
            "tool_choice": {"type": "function", "name": "f"},
            "stream": True,
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SHAPE}},
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "messages": [USER],
            "system": [{"type": "text", "text": "Be"}],
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "stop_sequences": ["x"],
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 2,
            "stream": True,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "1"}],
                            "is_error": True,
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": SHAPE}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "messages": [USER],
            "max_tokens": 2,
            "output_config": {"format": {"type": "json_schema", "schema": SHAPE}},
        },
    ),
    (
        "/v1/messages/count_tokens",
        {
            "model": "tiny",
            "messages": [USER],
            "system": "Be",
            "tools": [{"name": "f", "input_schema": SHAPE}],
        },
    ),
    (
        "/tokenize",
        {"model": "tiny", "prompt": "Hi", "add_special_tokens": False, "return_token_strs": True},
    ),
    ("/tokenize", {"messages": [USER], "tools": [TOOL], "add_generation_prompt": False}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7], "skip_special_tokens": True}),
]
ODD = [
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40, "", "x",
    "0", "-1", "null", "\x00", "\ud800", "é\u0301\u202e", "a" * 5000, [], {}, [[]], [{}], {"": None}, [None], [1, "a"],
    ["a", ["b"]], {"type": "text"}, {"type": None}, {"$ref": "#"}, {"type": "object", "properties": 3}, "(",
    "[a-", "(?<=a)b",
    "start:", "{{", "{% for %}", "<tool_call>", "</think>", "tiny", "user", "assistant", {"role": "user"}, [2**70],
]  # fmt: skip
