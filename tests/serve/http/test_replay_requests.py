"""Captured requests give the same tokens again; a broken product is named by its layer."""

import json

import live_server
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.cli.main import main
from cairn.models.lean import Lean
from cairn.serve.capture import Captured, digest_of, read_captured
from cairn.verify.first_divergence import departure, first_difference
from cairn.verify.replay import one_request, plain_of, replay


@pytest.fixture(scope="module")
def captured(tiny_folder, tmp_path_factory):
    """Twenty requests of several kinds, as a server wrote them down."""
    folder = tmp_path_factory.mktemp("captured")
    with live_server.live(tiny_folder, capture=folder, dtype="float32") as server:
        for number in range(20):
            server.client.completions.create(
                model="tiny",
                prompt=f"Once upon a time {number}",
                max_tokens=6 + number % 5,
                temperature=(0.0, 0.8, 1.2)[number % 3],
                top_p=0.9 if number % 2 else 1.0,
                n=1 + (number % 7 == 0),
                seed=number if number % 4 == 0 else None,
                extra_headers={"x-request-id": f"request-{number}"},
            )
        shaped = {"prompt": "Once", "max_tokens": 20, "guided_regex": "[ab]{3}c"}
        for prompt in ("one", "two"):
            again = {"prompt": prompt, "max_tokens": 2}
            server.http.post("/v1/completions", json=again, headers={"x-request-id": "again"})
        headers = {"x-request-id": "with-grammar"}
        assert server.http.post("/v1/completions", json=shaped, headers=headers).status_code == 200
        asked = server.http.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0},
            headers={"x-cairn-ledger": "1", "x-request-id": "with-ledger"},
        )
        assert asked.status_code == 200
        view = server.http.get(f"{server.url}/cairn/requests/with-ledger").json()
    return folder, view


def test_an_id_that_comes_again_takes_no_file_away(captured):
    found = [read_captured(file) for file in sorted(captured[0].glob("again*.json"))]
    assert [one.id for one in found] == ["again", "again"]
    assert found[0].answers[0].prompt != found[1].answers[0].prompt


def test_twenty_captured_requests_give_the_same_tokens(captured):
    folder, _ = captured
    found = [read_captured(file) for file in sorted(folder.glob("request-*.json"))]
    assert len(found) == 20
    assert all(answer.params.seed is not None for one in found for answer in one.answers)
    together = Captured(
        id="all",
        engine=found[0].engine,
        device="cpu",
        versions={},
        answers=[answer for one in found for answer in one.answers],
    )
    nothing = msgspec.structs.replace(together.answers[0], tokens=[], digest=digest_of([]))
    together.answers.append(nothing)  # it was aborted before its first token
    assert len(together.answers) == 24
    again = replay(together)
    assert [one.differs_at for one in again] == [None] * 24
    assert [one.digest for one in again] == [one.fast_digest for one in again]
    assert [one.departure for one in again] == [None] * 24
    assert max(max(one.errors, default=0.0) for one in again) < 1e-4


def test_what_only_a_server_has_keeps_no_request_from_being_replayed(captured):
    """Tiers want the prefix cache, and weights that are rounded as they are loaded are no float weights."""
    one = read_captured(captured[0] / "request-2.json")
    served = msgspec.structs.replace(one.engine, kv_offload_host="1MiB", max_loras=2)
    (found,) = replay(msgspec.structs.replace(one, engine=served))
    assert found.same
    rounded = msgspec.structs.replace(served, quantization="fp8", head="8bit", kv_cache_dtype="fp8")
    plain = plain_of(one_request(rounded))
    assert (plain.quantization, plain.head, plain.kv_cache_dtype) == (None, "auto", "auto")


def test_an_answer_that_followed_a_grammar_follows_it_again(captured):
    folder, _ = captured
    one = read_captured(folder / "with-grammar.json")
    (found,) = replay(one)
    assert found.tokens > 1
    assert (found.differs_at, found.plain_differs_at) == (None, None)


def test_the_ledger_has_the_digest_of_a_captured_answer(captured):
    folder, view = captured
    (answer,) = read_captured(folder / "with-ledger.json").answers
    assert view["digest"] == answer.digest


def test_a_broken_product_is_named_by_its_layer(captured):
    folder, _ = captured
    one = read_captured(folder / "request-3.json")
    layers = []

    def broken(engine):
        down = engine.runner.model.layers[1].feed_forward.down
        weight = down.matrices()[0]
        weight.data[::7] *= 1.5  # as a kernel would that forgets a scale in some rows
        engine.runner.lean = Lean(engine.runner.model)
        layers.append(len(engine.runner.model.layers))

    (found,) = replay(one, prepare=broken)
    assert layers == [len(found.errors)]
    assert found.departure.layer == 1
    assert found.departure.before < 1e-5 < found.departure.error


def test_the_verb_says_so_and_leaves_with_a_status(captured, capsys, tmp_path):
    folder, _ = captured
    assert main(["replay", "request-0", "--folder", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "the same tokens" in said
    assert "rounding only" in said
    file = folder / "request-1.json"
    written = json.loads(file.read_text())
    written["answers"][0]["tokens"][2] = (written["answers"][0]["tokens"][2] + 1) % 100
    written["answers"][0]["adapted"], written["weights_version"] = True, 3
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(written))
    assert main(["replay", str(changed), "--json"]) == 1
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out)[0]["differs_at"] == 2
    assert "adapter's" in said.err
    assert "version 3" in said.err
    assert main(["replay", str(tmp_path / "none.json")]) == 2


@given(st.lists(st.floats(1.0, 4.0), min_size=2, max_size=40), st.integers(0, 39))
def test_a_departure_is_the_layer_that_was_broken(growth, broken):
    """Rounding that grows up to fourfold a layer names nobody; a step of a thousand names its layer."""
    errors, error = [], 1e-9
    for step in growth:
        error = min(error * step, 9e-5)
        errors.append(error)
    assert departure(errors, 1e-4) is None
    broken %= len(errors)
    spoilt = [one + (0.3 if layer >= broken else 0.0) for layer, one in enumerate(errors)]
    assert departure(spoilt, 1e-4).layer == broken


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
