"""Files and batches with OpenAI's client: results for every line, a restart in the middle, the end of a window."""

import asyncio
import contextlib
import json
import resource
import time

import httpx
import live_server
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.serve.http.batches.files import FileStore, hold_folder
from cairn.serve.http.batches.runner import LOW_PRIORITY, BatchRunner, Performed
from cairn.serve.http.batches.store import BatchStore, Mistakes, read_lines
from cairn.serve.http.protocol.batches import BatchRequest
from cairn.serve.http.protocol.multipart import read_parts
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.keys import Keys

URL = "/v1/chat/completions"


def line(name: str, text: str = "Hi", **more) -> dict:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **more,
    }
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


def as_file(*lines: dict) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def ended(client: openai.OpenAI, id: str):
    for _ in range(3000):
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.01)
    raise AssertionError(batch)


def created(client: openai.OpenAI, *lines: dict):
    file = client.files.create(file=("lines.jsonl", as_file(*lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", metadata={"a": "b"}
    )


def results(client: openai.OpenAI, id: str | None) -> dict[str, dict]:
    if id is None:
        return {}
    lines = map(json.loads, client.files.content(id).text.splitlines())
    return {one["custom_id"]: one["response"] for one in lines}


# -- with a server --------------------------------------------------------------------------------


def test_every_line_is_answered_like_a_request_of_its_own(tiny_folder, tmp_path):
    with live_server.live(tiny_folder, batch_folder=tmp_path) as server:
        client = server.client
        lines = [line(f"line-{at}", f"Hello {at}") for at in range(12)] + [line("bad", n=0)]
        batch = ended(client, created(client, *lines).id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (13, 12, 1)
        found, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
        alone = client.chat.completions.create(**lines[3]["body"])
        (choice,) = found["line-3"]["body"]["choices"]
        assert choice["message"]["content"] == alone.choices[0].message.content
        assert set(found) == {f"line-{at}" for at in range(12)}
        with pytest.raises(ConfigError, match="another server runs the batches"):
            hold_folder(tmp_path)
        assert failed["bad"]["status_code"] == 400
        assert "n is 0" in failed["bad"]["body"]["error"]["message"]
        server.at_rest()

        assert [one.id for one in client.batches.list()] == [batch.id]
        names = {file.filename for file in client.files.list(limit=2)}  # more than one page
        assert names == {"lines.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_errors.jsonl"}
        made = [file.id for file in client.files.list(purpose="batch_output")]
        assert sorted(made) == sorted([batch.output_file_id, batch.error_file_id])
        everything = [file.id for file in client.files.list()]
        assert [file.id for file in client.files.list(order="asc")] == everything[::-1]
        assert server.http.get("/v1/files?order=up").status_code == 400
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.output_file_id)

        body = {"model": "tiny", "input": "Hello 3", "max_output_tokens": 4, "temperature": 0}
        other = {"custom_id": "r", "url": "/v1/responses", "body": body}
        file = client.files.create(file=("r.jsonl", as_file(other)), purpose="batch")
        started = client.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        )
        (response,) = results(client, ended(client, started.id).output_file_id).values()
        assert response["body"]["object"] == "response"


def test_a_batch_goes_on_after_a_restart_and_waits_for_others(tiny_folder, tmp_path):
    settings = {"batch_folder": tmp_path, "max_num_seqs": 2, "drain_timeout": 1.0}
    with live_server.live(tiny_folder, **settings) as server:
        lines = [line(f"line-{at}", max_tokens=40, ignore_eos=True) for at in range(10)]
        batch = created(server.client, *lines)
        live_server.wait_until(
            lambda: server.client.batches.retrieve(batch.id).request_counts.completed >= 2
        )
        assert server.service.admission.inside <= 2  # no more than rows
        priorities = {one.jobs[0].request.priority for one in list(server.service.open)}
        assert priorities <= {LOW_PRIORITY}
        answer = server.client.chat.completions.create(**line("x")["body"])
        assert answer.usage.completion_tokens == 4
        before = server.client.batches.retrieve(batch.id)
        assert before.status == "in_progress"
    (partial,) = tmp_path.glob("batches/*.output.jsonl")
    kept = len(partial.read_text().splitlines())
    assert 2 <= kept < 10
    with partial.open("ab") as file:
        file.write(b'{"id": "half of a li')
    with live_server.live(tiny_folder, **settings) as server:
        done = ended(server.client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 10)
        assert len(results(server.client, done.output_file_id)) == 10


def test_mistakes_are_said_and_keys_see_only_their_own(tiny_folder, tmp_path):
    keys = Keys([("alice", "sk-test"), ("bob", "sk-bob")])
    with live_server.live(tiny_folder, keys, batch_folder=tmp_path) as server:
        client, bob = server.client, server.client.with_options(api_key="sk-bob")
        wrong = ended(client, created(client, line("a"), line("a"), {"custom_id": 3}).id)
        assert wrong.status == "failed"
        assert [error.line for error in wrong.errors.data] == [2, 3]
        assert "again" in wrong.errors.data[0].message
        with pytest.raises(openai.NotFoundError):
            bob.batches.retrieve(wrong.id)
        with pytest.raises(openai.NotFoundError):
            bob.files.content(wrong.input_file_id)
        assert list(bob.files.list()) == list(bob.batches.list()) == []
        with pytest.raises(openai.BadRequestError, match="it has to be batch"):
            client.files.create(file=("x", b"{}"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="the file is empty"):
            client.files.create(file=("x", b""), purpose="batch")
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id="file-x", endpoint=URL, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="multipart"):
            client.post("/files", cast_to=object, body={"a": 1})
        assert list(client.files.list(after=wrong.input_file_id)) == []
        with server.held():
            batch = created(client, *[line(f"{at}") for at in range(40)])
            live_server.wait_until(lambda: client.batches.retrieve(batch.id).status != "validating")
            behind = created(client, line("a"))  # waits for the other one
            assert client.batches.cancel(behind.id).status == "cancelled"
            assert client.files.delete(behind.input_file_id).deleted
            with pytest.raises(openai.BadRequestError, match="not over"):
                client.files.delete(batch.input_file_id)
            assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch.id).status == "cancelled"
        server.at_rest()


def test_without_a_folder_there_are_none(server):
    with pytest.raises(openai.NotFoundError, match="--batch-folder"):
        server.client.files.list()


# -- without one ----------------------------------------------------------------------------------


def test_a_line_without_room_is_tried_again_and_a_window_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("cairn.serve.http.batches.runner.RETRY_S", 0.0)
    now, asked = [1000.0], []

    async def perform(url, body, holder, id):
        name = json.loads(body)["messages"][0]["content"]
        asked.append(name)
        if name == "late":
            now[0] += 25 * 3600
            await asyncio.sleep(60)
        status = 429 if asked.count(name) < 3 else 200
        return Performed(status, b'{"said": 1}')

    class Room:
        def has_free_row(self):
            return False

    async def run():
        clock = lambda: now[0]  # noqa: E731
        files = FileStore(tmp_path, clock)
        store = BatchStore(tmp_path, files, clock)
        runner = BatchRunner(store, perform, Room(), clock)
        lines = as_file(line("a", "first"), line("b", "late"), line("c", "never"))
        id = (await files.put("me", "f", "batch", lines)).id
        batch = store.create("me", BatchRequest(input_file_id=id, endpoint=URL))
        runner.start()
        while not batch.is_over:
            await asyncio.sleep(0.01)
        await runner.stop()
        return batch, files.data_path(batch.output_file_id).read_text()

    batch, output = asyncio.run(run())
    assert (batch.status, batch.request_counts.completed, batch.request_counts.total) == (
        "expired",
        1,
        3,
    )
    assert json.loads(output)["response"] == {
        "status_code": 200,
        "request_id": json.loads(output)["id"],
        "body": {"said": 1},
    }
    assert asked == ["first"] * 3 + ["late"]


def test_a_batch_whose_results_cannot_be_read_fails_alone(tmp_path):
    """Bytes that are no JSON, as after a disk lost some: the batches behind it are still worked off."""

    async def perform(url, body, holder, id):
        return Performed(200, b"{}")

    class Room:
        def has_free_row(self):
            return True

    async def run():
        files = FileStore(tmp_path, time.time)
        store = BatchStore(tmp_path, files, time.time)
        runner = BatchRunner(store, perform, Room(), time.time)
        id = (await files.put("me", "f", "batch", as_file(line("a")))).id
        asked = BatchRequest(input_file_id=id, endpoint=URL)
        batches = [store.create("me", asked) for _ in range(2)]
        broken = store.unfinished()[0].batch
        (tmp_path / "batches" / f"{broken.id}.output.jsonl").write_bytes(b"\0\0\n")
        runner.start()
        async with asyncio.timeout(10):
            while not all(batch.is_over for batch in batches):
                await asyncio.sleep(0.01)
        await runner.stop()
        return broken, next(batch for batch in batches if batch is not broken)

    broken, sound = asyncio.run(run())
    assert (broken.status, broken.errors.data[0].code) == ("failed", "server_error")
    assert (sound.status, sound.request_counts.completed) == ("completed", 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no requests"),
        (b"{", "truncated"),
        (b"\xff{}", "0xff at byte 0"),
        (b'{"custom_id": "b\xffc"}', "0xff at byte 16 is not UTF-8"),
        (b"[1]", "object"),
        (as_file(line("a") | {"url": "/v1/embeddings"}), "the batch is for"),
        (as_file(line("a", stream=True)), "not streamed"),
        (b'{"custom_id": ' + b"[" * 100_000, "custom_id is wrong; it has to be text"),
        (as_file(line("a") | {"custom_id": 1}), "custom_id is 1; it has to be text"),
    ],
)
def test_an_input_file_that_is_none(content, said):
    with pytest.raises(Mistakes, match=said):
        read_lines(content, URL)


@given(
    st.dictionaries(st.sampled_from(["file", "purpose", "é"]), st.binary(max_size=40), min_size=1),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=9),
)
def test_forms_of_a_real_client_are_read(fields, filename):
    """httpx writes them."""
    files = {name: (filename, content) for name, content in fields.items()}
    sent = httpx.Request("POST", "http://x", files=files)
    found = read_parts(sent.headers["content-type"], sent.read())
    assert {name: part.content for name, part in found.items()} == fields


@given(st.binary(max_size=60), st.sampled_from([b"", b"--b", b"--b\r\n", b"--b--", b"\r\n--b--"]))
def test_no_body_is_worse_than_a_400(body, end):
    with contextlib.suppress(Refusal):  # any other error fails
        read_parts("multipart/form-data; boundary=b", b"--b\r\n" + body + end)


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path):
    files = FileStore(tmp_path, lambda: 0.0)
    store = BatchStore(tmp_path, files, lambda: 0.0)
    held = asyncio.run(files.put("me", "a.jsonl", "batch", as_file(line("a"))))
    results = tmp_path / "results"
    results.write_bytes(b"x" * 10)
    before = sorted(tmp_path.rglob("*"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(Refusal, match="cannot keep this") as file_refused:
            asyncio.run(files.put("me", "b.jsonl", "batch", b"x" * 10))
        with pytest.raises(OSError, match="too large"):
            files.adopt("me", "results", results)
        with pytest.raises(Refusal, match="cannot keep this") as batch_refused:
            store.create(
                "me", BatchRequest(input_file_id=held.id, endpoint=URL, completion_window="24h")
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert file_refused.value.status == batch_refused.value.status == 507
    assert files.of("me") == [held]
    assert not store.of("me")
    batches = tmp_path / "batches"  # which may have an empty file of the batch
    kept = [path for path in sorted(tmp_path.rglob("*")) if path.parent != batches]
    assert kept == [path for path in before if path.parent != batches]


def test_each_key_has_room_of_its_own_and_results_are_not_copied(tmp_path):
    files = FileStore(tmp_path, lambda: 0.0, key_bytes=100)

    async def put(holder, size):
        return await files.put(holder, "a.jsonl", "batch", b"x" * size)

    async def together():
        return await asyncio.gather(*(put("ann", 40) for _ in range(4)), return_exceptions=True)

    made = asyncio.run(together())  # also while the others are being written
    assert [isinstance(one, Refusal) for one in made] == [False, False, True, True]
    assert (made[2].status, made[2].code) == (413, "files_full")
    assert asyncio.run(put("bob", 100)).bytes == 100
    files.drop("ann", made[0].id)
    asyncio.run(put("ann", 60))
    results = tmp_path / "results"
    results.write_bytes(b"y" * 1000)
    adopted = files.adopt("ann", "results", results)
    assert files.data_path(adopted.id).samefile(results)
    results.unlink()
    assert files.data_path(adopted.id).read_bytes() == b"y" * 1000
