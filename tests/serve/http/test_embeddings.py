"""Embeddings through OpenAI's unmodified client, against the hidden states of transformers on the same weights."""

import base64
import concurrent.futures
import os

import live_server
import numpy as np
import openai
import pytest
import torch
import transformers

TEXTS = ["The quick brown fox", "Once upon a time there was a king who had no hat", "Yes"]


@pytest.fixture(scope="module")
def oracle(tiny_folder):
    return Oracle(transformers.AutoModel.from_pretrained(tiny_folder, dtype=torch.float32))


class Oracle:
    def __init__(self, model):
        self.model = model.eval()

    @torch.inference_mode()
    def vector(self, ids, pooling="mean", dimensions=None):
        hidden = self.model(torch.tensor([ids])).last_hidden_state[0].double()
        pooled = (hidden.mean(0) if pooling == "mean" else hidden[-1])[:dimensions]
        return (pooled / pooled.norm()).numpy()


def vectors(server, given, **asked):
    made = server.client.embeddings.create(model="tiny", input=given, **asked)
    assert [one.index for one in made.data] == list(range(len(made.data)))
    return [np.array(one.embedding) for one in made.data], made.usage


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_all_forms_of_input_and_both_poolings(server, oracle):
    ids = [server.service.tokenizer.encode(text) for text in TEXTS]
    for pooling in ("mean", "last"):
        body = {"pooling": pooling}
        expected = [oracle.vector(one, pooling) for one in ids]
        for given, wanted in (
            (TEXTS, expected),
            (TEXTS[0], expected[:1]),
            (ids, expected),
            (ids[0], expected[:1]),
        ):
            found, usage = vectors(server, given, extra_body=body)
            close(found, wanted)
            assert usage.prompt_tokens == usage.total_tokens
        assert usage.total_tokens == len(ids[0])
    default, _ = vectors(server, TEXTS[1])
    close(default, [oracle.vector(ids[1], "mean")])
    assert np.linalg.norm(default[0]) == pytest.approx(1, abs=1e-6)


def test_the_two_encodings_hold_the_same_numbers(server):
    body = {"model": "tiny", "input": TEXTS}
    plain = server.http.post("/v1/embeddings", json=body).json()
    packed = server.http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    for one, other in zip(plain["data"], packed["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert np.frombuffer(raw, "<f4").tolist() == one["embedding"]
    close(vectors(server, TEXTS, encoding_format="float")[0], vectors(server, TEXTS)[0])


def test_fewer_dimensions_are_the_first_ones_normalised(server, oracle):
    ids = server.service.tokenizer.encode(TEXTS[0])
    close(vectors(server, ids, dimensions=5)[0], [oracle.vector(ids, dimensions=5)])
    with pytest.raises(openai.BadRequestError, match=r"dimensions is 33.*between 1 and 32"):
        vectors(server, ids, dimensions=33)


def test_a_prompt_that_is_cached_or_computed_in_chunks_has_the_same_vector(tiny_folder, oracle):
    prompt = [7 + i * i % 90 for i in range(150)]
    with live_server.live(tiny_folder, max_num_batched_tokens=32) as server:
        server.client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        for pooling in ("mean", "last"):
            found = vectors(server, [prompt, prompt[:70]], extra_body={"pooling": pooling})[0]
            close(found, [oracle.vector(prompt, pooling), oracle.vector(prompt[:70], pooling)])
        server.at_rest()
        assert len(server.engine.pools) == 0


def test_many_at_once_in_a_cache_that_is_too_small_while_others_generate(tiny_folder, oracle):
    """Preemption begins a prompt again, and generation goes on meanwhile."""
    prompts = [[9 + (i * k) % 80 for i in range(20 + 7 * k)] for k in range(1, 17)]
    asked = dict(model="tiny", prompt=prompts[3], max_tokens=40, temperature=0)
    asked["extra_body"] = {"ignore_eos": True}
    with live_server.live(
        tiny_folder, num_gpu_blocks_override=14, block_size=16, max_num_batched_tokens=48
    ) as server:
        text = server.client.completions.create(**asked).choices[0].text
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            texts = [pool.submit(server.client.completions.create, **asked) for _ in range(3)]
            found = vectors(server, prompts)[0]
        close(found, [oracle.vector(prompt) for prompt in prompts])
        assert {one.result().choices[0].text for one in texts} == {text}
        server.at_rest()
        assert len(server.engine.pools) == 0


def test_an_engine_in_a_process_of_its_own(tiny_folder, oracle):
    with live_server.live(tiny_folder, engine_in="process") as server:
        ids = server.service.tokenizer.encode(TEXTS[1])
        for pooling in ("mean", "last"):
            found = vectors(server, [ids, ids[:3]], extra_body={"pooling": pooling})[0]
            close(found, [oracle.vector(ids, pooling), oracle.vector(ids[:3], pooling)])


@pytest.mark.skipif(not os.environ.get("CAIRN_LONG"), reason="takes long; set CAIRN_LONG=1")
def test_ranks_that_share_the_model(tiny_folder, oracle):
    with live_server.live(tiny_folder, tensor_parallel_size=2) as server:
        ids = server.service.tokenizer.encode(TEXTS[1])
        close(vectors(server, ids)[0], [oracle.vector(ids)])


def test_what_is_refused(server):
    for body, param, said in (
        ({"input": [5] * 200}, "input", "200 tokens, the context is 160"),
        ({"input": [[5] * 200, [5]]}, "input", "200 tokens, the context is 160"),
        ({"input": ["a", "a b " * 80]}, "input", "input[1]: the prompt has"),
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a", 3]}, "input", "different kinds"),
        ({"input": ""}, "input", "empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": [10**6]}, "input", "vocabulary"),
        ({"input": ["a"] * 2000}, "input", "2000 entries; at most 1032"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", '"base64" or "float"'),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and"),
        ({"input": "a", "pooling": "max"}, "pooling", "mean and last"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "this model has: none"),
        ({}, "input", "is missing"),
    ):
        response = server.http.post("/v1/embeddings", json=body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert said in error["message"]
        assert error["param"] == param, body
