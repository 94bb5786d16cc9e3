"""An answer that goes on behind a last message of the assistant: what `transformers` makes of it is the oracle."""

import live_server
import pytest
import transformers

ASKED = [{"role": "user", "content": "Is it the end?"}]
PATH = "/v1/chat/completions"


def begun(text):
    return [*ASKED, {"role": "assistant", "content": text}]


# Words of the template itself, words that were said before, and blanks that it may trim.
@pytest.mark.parametrize(
    "text", ["It is", "end", "assistant", "Is it the end?", "So ", "a\n\nb", "😀"]
)
@pytest.mark.parametrize("parts", [False, True])
def test_the_prompt_ends_with_the_message(server, tiny_folder, text, parts):
    content = [{"type": "text", "text": text}] if parts else text
    asked = {"messages": begun(content), "continue_final_message": True}
    found = server.http.post("/apply-template", json=asked).json()["prompt"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    wanted = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) + text
    assert found.rstrip() == wanted.rstrip()
    closed = server.http.post("/apply-template", json={"messages": begun(content)}).json()["prompt"]
    assert closed.startswith(found)
    assert len(closed) > len(found)


def test_answers_go_on_on_both_doors(server):
    body = {"model": "tiny", "messages": begun("It is"), "max_tokens": 4, "temperature": 0}
    chat = server.http.post(PATH, json=body | {"continue_final_message": True}).json()
    text = server.http.post("/apply-template", json=body | {"continue_final_message": True}).json()
    plain = {
        "prompt": text["prompt"],
        "max_tokens": 4,
        "temperature": 0,
        "add_special_tokens": False,
    }
    whole = server.http.post("/v1/completions", json=plain).json()
    assert chat["choices"][0]["message"]["content"] == whole["choices"][0]["text"]
    message = server.http.post("/v1/messages", json=body).json()
    assert message["content"][0]["text"] == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("begins", "thought"), [("<think>Hm, ", "so"), ("<think>Hm.</think>It", None), ("It is", None)]
)
def test_a_thought_that_the_message_has_opened_goes_on_as_one(agent, begins, thought):
    body = {"messages": begun(begins), "continue_final_message": True, "max_tokens": 60}
    said = "so</think>Yes." if thought else " is."
    with live_server.scripted(agent, said):
        message = agent.http.post(PATH, json=body).json()["choices"][0]["message"]
    assert message.get("reasoning_content") == thought
    assert message["content"].strip() == ("Yes." if thought else "is.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messages": ASKED}, "is not the assistant's"),
        (
            {"messages": begun("")},
            "messages[1] is the assistant's and the last one, and has no text",
        ),
        ({"messages": begun("So"), "add_generation_prompt": True}, "set one of them"),
        ({"continue_final_message": False, "functions": [{"name": "f"}]}, "use tools"),
        ({"continue_final_message": False, "modalities": ["text", "audio"]}, "answers with text"),
    ],
)
def test_mistakes(server, changes, said):
    body = {"messages": ASKED, "continue_final_message": True, "max_tokens": 1} | changes
    refused = server.http.post(PATH, json=body)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
