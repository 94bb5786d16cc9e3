"""Text encoders and rerankers behind HTTP, against transformers on the same weights."""

import base64
import concurrent.futures
import json

import live_server
import numpy as np
import openai
import pytest
import tiny_encoders
import torch
import transformers
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.serve.text_vectors import RERANK_AFTER, RERANK_BEFORE, RERANK_TASK

TEXTS = ["the quick brown fox", "once upon a time there was a little girl", "yes", "the park"]
POOLED_BY_CLS = {"1_Pooling__config": {"pooling_mode_cls_token": True}}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    return tiny_encoders.save(
        folder,
        tiny_encoders.reference("bert"),
        modules=tiny_encoders.modules("Transformer", "Pooling"),
        config_sentence_transformers={"prompts": {"query": "time: ", "document": ""}},
        sentence_bert_config={"max_seq_length": 30},
        **POOLED_BY_CLS,
    )


@pytest.fixture(scope="module")
def encoder(embedder):
    with live_server.live(embedder, max_num_batched_tokens=40) as made:
        yield made


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    model = tiny_encoders.reference("bert", "ForSequenceClassification", num_labels=1)
    return tiny_encoders.save(tmp_path_factory.mktemp("cross"), model)


@torch.inference_mode()
def cls_vector(folder, text):
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    return model(ids["input_ids"]).last_hidden_state[0, 0].numpy()


def test_openai_client_gets_what_transformers_computes(encoder, embedder):
    """The files say: the first token, at its own length; a request may say otherwise."""
    create = encoder.client.embeddings.create
    made = create(model="tiny", input=TEXTS)
    expected = [cls_vector(embedder, text) for text in TEXTS]
    for one, wanted in zip(made.data, expected, strict=True):
        np.testing.assert_allclose(one.embedding, wanted, atol=2e-4)
    unit = create(model="tiny", input=TEXTS[0], extra_body={"normalize": True}, dimensions=8)
    part = expected[0][:8]
    np.testing.assert_allclose(unit.data[0].embedding, part / np.linalg.norm(part), atol=1e-4)
    asked = create(model="tiny", input="fox", extra_body={"prompt_name": "query"})
    wanted = cls_vector(embedder, "time: fox")
    np.testing.assert_allclose(asked.data[0].embedding, wanted, atol=2e-4)
    assert made.usage.total_tokens == sum(
        len(encoder.service.tokenizer.encode(text)) for text in TEXTS
    )


def test_many_clients_share_batches_and_get_their_own_vectors(encoder, embedder):
    expected = [cls_vector(embedder, text) for text in TEXTS]
    create = encoder.client.embeddings.create
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(create, model="tiny", input=TEXTS[at % 4]) for at in range(32)]
        for at, call in enumerate(calls):
            found = call.result().data[0].embedding
            np.testing.assert_allclose(found, expected[at % 4], atol=2e-4)
    stats = encoder.service.serving.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.steps < stats.prompt_tokens


def test_what_an_encoder_does_not_do_is_refused_with_a_reason(encoder):
    with pytest.raises(openai.BadRequestError, match="text encoder"):
        encoder.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}]
        )
    with pytest.raises(openai.BadRequestError, match="text encoder"):
        encoder.client.completions.create(model="tiny", prompt="hello")
    long = {"input": "the park " * 20}
    refused = encoder.http.post("/v1/embeddings", json=long)
    assert refused.status_code == 400
    assert "the longest that the model reads has 30" in refused.json()["error"]["message"]
    cut = encoder.http.post("/v1/embeddings", json=long | {"truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["total_tokens"] == 30
    for path, body, param in (
        ("/classify", {"input": "a"}, "model"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 31}, "truncate_prompt_tokens"),
    ):
        answer = encoder.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), path
    for path in ("/health", "/metrics", "/cairn/engine", "/cairn/model", "/cairn/requests"):
        assert encoder.http.get(path).status_code == 200, path


def test_rerank_with_embeddings_is_the_cosine(encoder, embedder):
    body = {"query": "time", "documents": TEXTS, "top_n": 3}
    results = encoder.http.post("/v1/rerank", json=body).json()["results"]
    query = cls_vector(embedder, "time: time")
    vectors = [cls_vector(embedder, text) for text in TEXTS]
    cosines = [float(query @ one / np.linalg.norm(query) / np.linalg.norm(one)) for one in vectors]
    order = sorted(range(4), key=lambda at: -cosines[at])[:3]
    assert [one["index"] for one in results] == order
    for one in results:
        assert one["relevance_score"] == pytest.approx(cosines[one["index"]], abs=1e-4)
        assert one["document"] == {"text": TEXTS[one["index"]]}


def test_clients_of_other_servers_get_the_same_vectors_and_scores(encoder):
    def post(path, **body):
        answer = encoder.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    made = encoder.client.embeddings.create(
        model="tiny", input=TEXTS, extra_body={"normalize": True}
    )
    unit = np.array([one.embedding for one in made.data])
    np.testing.assert_allclose(post("/embed", inputs=TEXTS), unit, atol=1e-6)
    ollama = post("/api/embed", model="tiny:latest", input=[*TEXTS, "word " * 99])
    np.testing.assert_allclose(ollama["embeddings"][:-1], unit, atol=1e-6)
    assert ollama["prompt_eval_count"] == made.usage.prompt_tokens + 30  # the last one was cut
    raw = np.array(post("/api/embeddings", model="tiny", prompt=TEXTS[0])["embedding"])
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit[0], atol=1e-6)

    ranked = post("/v2/rerank", query="park", documents=TEXTS, max_tokens_per_doc=4096)["results"]
    listed = post("/rerank", query="park", texts=TEXTS, return_text=True)
    assert [one["text"] for one in listed] == [one["document"]["text"] for one in ranked]
    assert [one["score"] for one in listed] == [one["relevance_score"] for one in ranked]
    for body, field in (({}, "documents"), ({"texts": ["a"], "documents": ["a"]}, "texts")):
        answer = encoder.http.post("/rerank", json={"query": "a", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_cohere_client_gets_the_same_vectors_in_every_number_type(encoder, embedder):
    """Against the vectors of transformers, and each type against its definition."""

    def post(**body):
        answer = encoder.http.post("/v2/embed", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    every = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    made = post(texts=TEXTS, input_type="search_document", embedding_types=every)
    found = made["embeddings"]
    expected = np.stack([cls_vector(embedder, text) for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(found["float"], expected, atol=1e-4)
    vectors = np.array(found["float"], dtype=np.float32)
    for text, vector in zip(found["base64"], vectors, strict=True):
        assert np.array_equal(np.frombuffer(base64.b64decode(text), "<f4"), vector)
    whole = np.array(found["int8"])
    scale = np.abs(vectors).max(-1, keepdims=True) / 127
    np.testing.assert_allclose(whole * scale, vectors, atol=float(scale.max()) / 2 + 1e-6)
    assert (np.abs(whole).max(-1) == 127).all()
    assert np.array_equal(found["uint8"], whole + 128)
    signs = [[f"{byte:08b}" for byte in row] for row in found["ubinary"]]
    assert ["".join(row) for row in signs] == [
        "".join("01"[int(value >= 0)] for value in row) for row in vectors
    ]
    assert np.array_equal(found["binary"], np.array(found["ubinary"]) - 128)
    assert made["texts"] == TEXTS
    assert made["meta"]["billed_units"]["input_tokens"] == sum(
        len(encoder.service.tokenizer.encode(text)) for text in TEXTS
    )
    # A query has the model's prompt for queries; inputs are texts in another coat.
    asked = [{"content": [{"type": "text", "text": "fox"}]}]
    query = post(inputs=asked, input_type="search_query")["embeddings"]
    assert set(query) == {"float"}
    wanted = cls_vector(embedder, "time: fox")
    np.testing.assert_allclose(query["float"][0], wanted / np.linalg.norm(wanted), atol=1e-4)


def test_cohere_truncate_keeps_the_end_that_is_asked_for(encoder, embedder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedder)
    long = " ".join(TEXTS * 6)
    for truncate, side in (("END", "right"), ("START", "left")):
        tokenizer.truncation_side = side
        for body, most in (({}, 30), ({"max_tokens": 9}, 9), ({"max_tokens": 999}, 30)):
            ids = tokenizer(long, truncation=True, max_length=most)["input_ids"]
            answer = encoder.http.post(
                "/v2/embed", json={"texts": [long], "truncate": truncate, **body}
            ).json()
            direct = encoder.http.post(
                "/v1/embeddings",
                json={"input": [ids], "add_special_tokens": False, "normalize": True},
            ).json()
            wanted = direct["data"][0]["embedding"]
            np.testing.assert_allclose(answer["embeddings"]["float"][0], wanted, atol=1e-5)
            assert answer["meta"]["billed_units"]["input_tokens"] == most == len(ids)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "texts is missing"),
        ({"texts": []}, "empty list"),
        ({"texts": ["a"], "inputs": []}, "give one of"),
        ({"texts": ["a " * 99], "truncate": "NONE"}, "the longest that the model reads has 30"),
        ({"texts": ["a"], "truncate": "NONE", "max_tokens": 3}, "leave one of them out"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate is"),
        ({"texts": ["a"], "embedding_types": ["float", "int4"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["ubinary"], "output_dimension": 9}, "that 8 divides"),
        ({"texts": ["a"], "output_dimension": 4096}, "output_dimension is 4096"),
        ({"texts": ["a"], "input_type": "image"}, "images are not embedded"),
        ({"images": ["data:image/png;base64,AA=="]}, "images are not embedded"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content has image_url"),
    ],
)
def test_cohere_mistakes_are_named(encoder, body, said):
    answer = encoder.http.post("/v2/embed", json=body)
    assert answer.status_code == 400
    assert said in answer.json()["message"]


def test_cohere_rerank_cuts_documents_and_names_mistakes_its_way(encoder):
    """/v1/rerank refuses a document that is too long; Cohere's client expects that it is cut."""
    long = {"query": "park", "documents": [TEXTS[0], "park " * 45]}
    refused = encoder.http.post("/v1/rerank", json=long)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert "the model reads 30; truncate_prompt_tokens = -1 cuts it" in refused.text
    cut = encoder.http.post("/v1/rerank", json=long | {"truncate_prompt_tokens": -1}).json()
    assert encoder.http.post("/v2/rerank", json=long).json()["results"] == cut["results"]
    for body, said in (
        ({"query": "a"}, "documents is missing"),
        ({"query": "a", "documents": []}, "empty list"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["a"], "model": 3}, "model"),
    ):
        answer = encoder.http.post("/v2/rerank", json=body)
        assert answer.status_code in (400, 404), body
        assert list(answer.json()) == ["message"]
        assert said in answer.json()["message"]


def test_rerank_order_of_a_cross_encoder_is_that_of_transformers(cross_encoder):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)
    query = "a little park"
    with torch.inference_mode():
        logits = [
            float(model(**tokenizer(query, text, return_tensors="pt")).logits) for text in TEXTS
        ]
    expected = [float(torch.sigmoid(torch.tensor(one))) for one in logits]
    assert np.ptp(logits) > 0.01  # an order that can be wrong
    with live_server.live(cross_encoder) as server:
        body = {"query": query, "documents": TEXTS, "return_documents": False}
        results = server.http.post("/rerank", json=body).json()["results"]
        order = [one["index"] for one in results]
        assert sorted(order) == list(range(len(TEXTS)))
        assert np.all(np.diff(np.array(expected)[order]) < 1e-5)  # from the best to the worst
        assert "document" not in results[0]
        scored = server.http.post("/score", json={"text_1": query, "text_2": TEXTS}).json()
        np.testing.assert_allclose([one["score"] for one in scored["data"]], expected, atol=1e-4)
        labels = server.http.post("/classify", json={"input": TEXTS}).json()["data"]
        assert [one["num_classes"] for one in labels] == [1] * 4


def decoder_logits(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -1]


def test_a_reranker_that_answers_yes_or_no(tmp_path):
    """Without any override: its name says what it is, its tokens what it answers with."""
    folder = live_server.make_folder(
        tmp_path / "tiny-Reranker", context=400, added=["yes", "no"], special=False
    )
    with LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        scores = llm.score("the fox", TEXTS)
        ranked = llm.rank("the fox", TEXTS)
        encode = llm.tokenizer.encode
        for text, found in zip(TEXTS, scores, strict=True):
            body = f"<Instruct>: {RERANK_TASK}\n<Query>: the fox\n<Document>: {text}"
            parts = (RERANK_BEFORE, body, RERANK_AFTER)
            ids = [id for part in parts for id in encode(part, special=False)]
            logits = decoder_logits(folder, ids)
            yes, no = llm.tokenizer.id("yes"), llm.tokenizer.id("no")
            assert found == pytest.approx(float(torch.sigmoid(logits[yes] - logits[no])), abs=1e-5)
        assert [at for at, _ in ranked] == list(np.argsort(scores)[::-1])


def test_a_decoder_whose_files_say_last_token_or_a_head(tiny_folder, tmp_path):
    """Qwen3-Embedding is such a model: the mean, which was taken for every model, is wrong for it."""
    for name in tiny_folder.iterdir():
        (tmp_path / name.name).write_bytes(name.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(2)
    tensors["score.weight"] = torch.randn(2, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModel.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    config = transformers.AutoConfig.from_pretrained(tiny_folder)
    config.architectures = ["LlamaForSequenceClassification"]
    config.num_labels = 2
    config.save_pretrained(tmp_path)
    for path, content in (
        ("modules", tiny_encoders.modules("Transformer", "Pooling", "Normalize")),
        ("1_Pooling/config", {"pooling_mode": "lasttoken"}),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / f"{path}.json").write_text(json.dumps(content))
    with LLM(str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=64) as llm:
        ids = llm.tokenizer.encode(TEXTS[1])
        with torch.inference_mode():
            last = model(torch.tensor([ids])).last_hidden_state[0, -1]
        np.testing.assert_allclose(llm.embed(TEXTS[1])[0], last / last.norm(), atol=1e-5)
        found = llm.classify(TEXTS[1])[0]
        wanted = (tensors["score.weight"] @ last).softmax(-1)
        np.testing.assert_allclose(list(found.values()), wanted, atol=1e-5)
