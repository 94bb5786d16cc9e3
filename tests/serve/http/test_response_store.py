"""Kept responses: how much memory they take, and who chooses their ids."""

import random

import live_server

from cairn.serve.http.protocol.responses import ModelResponse
from cairn.serve.http.server.response_store import ResponseStore, Stored


def stored(id, size, before=None):
    response = ModelResponse(id=id, created_at=0, model="tiny")
    return Stored(response, [{"said": f"in {id}"}], [{"said": f"out {id}"}], before, size)


def reachable(store):
    """Every turn that is in memory, by walking from those that are kept."""
    turns = {}
    for turn in store._kept.values():
        while turn is not None:
            turns[id(turn)] = turn
            turn = turn.before
    return turns.values()


def test_a_turn_is_in_memory_once_and_counted_as_long_as_it_is():
    draw, store, known = random.Random(3), ResponseStore(20, most_bytes=500), []
    for step in range(2_000):
        before = draw.choice([None, *known[-30:]])  # it may have been forgotten meanwhile
        one = stored(f"resp_{draw.randrange(300)}", draw.randrange(60), before)
        store.put("ann", one)
        known.append(one)
        if step % 3 == 0:
            store.drop("ann", f"resp_{draw.randrange(300)}")
        kept = reachable(store)
        assert store.bytes == sum(turn.size for turn in kept) <= 500
        assert len(store._kept) <= 20
        if one in store._kept.values():
            assert one.items[-1] == {"said": f"out {one.response.id}"}
            earlier = before.items if before is not None else []
            assert one.inputs == [*earlier, {"said": f"in {one.response.id}"}]


def test_the_request_id_of_a_client_is_not_the_id_of_what_is_kept(tiny_folder):
    with live_server.live(tiny_folder, store_responses=8) as server:

        def ask(text, **headers):
            body = {"input": text, "max_output_tokens": 2, "temperature": 0}
            headers |= {"x-request-id": "mine"}
            return server.http.post("/v1/responses", json=body, headers=headers).json()

        first = ask("Once")
        for headers in ({}, {"x-cairn-router": "1"}, {"x-cairn-router": "1"}):
            other = ask("Twice upon a time", **headers)
            assert "mine" not in other["id"]
            assert other["id"] != first["id"]
            kept = server.http.get(f"/v1/responses/{first['id']}").json()
            assert kept["output"] == first["output"]
            first = other
        assert server.http.get("/v1/responses/resp_mine").status_code == 404
        items = server.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
        assert items[0]["content"][0]["text"] == "Twice upon a time"
