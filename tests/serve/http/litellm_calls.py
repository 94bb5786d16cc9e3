"""What litellm, unmodified, makes of our server: calls it in every way and prints the answers as one JSON document.

A program of its own, because litellm starts threads and sessions that outlive their use. Run with the server's address.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # its table of prices comes from the package
os.environ["LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"] = "True"
import litellm

litellm.telemetry = False
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(url: str) -> dict[str, object]:
    there = dict(api_base=f"{url}/v1", api_key="sk-test", num_retries=0, timeout=60)
    chat = dict(model="openai/tiny", messages=MESSAGES, temperature=0, max_tokens=12, **there)
    found: dict[str, object] = {}
    whole = litellm.completion(**chat)
    found["chat"] = whole.choices[0].message.content
    found["tokens"] = whole.usage.completion_tokens
    chunks = litellm.completion(**chat, stream=True)
    found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    text = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="Once", temperature=0, max_tokens=12, **there
    )
    found["completion"] = text.choices[0].text
    embedded = litellm.embedding(model="openai/tiny", input=["Once", "upon"], **there)
    found["embedding"] = [one["embedding"] for one in embedded.data]
    call = litellm.completion(
        **chat | {"max_tokens": 200},
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    function = call.choices[0].message.tool_calls[0].function
    found["call"] = [function.name, json.loads(function.arguments)]
    answer = litellm.responses(
        model="openai/tiny",
        input="Once upon a time",
        temperature=0,
        max_output_tokens=12,
        api_base=f"{url}/v1",
        api_key="sk-test",
    )
    found["responses"] = answer.output[0].content[0].text
    message = litellm.completion(
        model="anthropic/tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        api_base=f"{url}/v1/messages",
        api_key="sk-test",
    )
    found["anthropic"] = message.choices[0].message.content
    other = litellm.completion(**chat | {"model": "openai/other"})
    found["unknown"] = other.choices[0].message.content
    try:
        litellm.completion(**chat | {"temperature": 9})
    except litellm.BadRequestError as error:
        found["wrong"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # its threads have nothing left to do
