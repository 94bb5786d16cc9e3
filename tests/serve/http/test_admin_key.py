"""Who may change a running server: the holder of the admin key; without any keys, programs of its own machine."""

import live_server
import pytest

from cairn.core.errors import ConfigError
from cairn.serve.http.server.keys import Keys, check_admin_key, read_keys

USER, ADMIN = "sk-ann", "root-4f9c"
TEXT = {"prompt": "x", "max_tokens": 1}
# Each with a body that is fine, but for the adapter and the weights, which are not there.
CHANGES = {
    "/pause": {},
    "/resume": None,
    "/sleep": None,
    "/wake_up": None,
    "/reset_prefix_cache": None,
    "/cairn/role": {"role": "both"},
    "/update_weights": {"version": 1, "source": "/absent/folder"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/absent/folder"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
}


def bearer(key):
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def guarded(tiny_folder):
    keys = Keys([("ann", USER)], admin=ADMIN)
    with live_server.live(tiny_folder, keys, admin_endpoints=True) as made:
        yield made
        made.at_rest()


@pytest.fixture(scope="module")
def unguarded(tiny_folder):
    with live_server.live(tiny_folder, admin_endpoints=True) as made:
        yield made
        made.at_rest()


@pytest.mark.parametrize("path", CHANGES)
def test_a_key_that_may_generate_may_not_change_the_server(guarded, path):
    def asked(key):
        return guarded.http.post(path, json=CHANGES[path], headers=bearer(key))

    assert asked(None).status_code == 401
    assert asked("root").status_code == 401
    refused = asked(USER)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
    assert asked(ADMIN).status_code in (200, 400, 404, 409)


def test_the_admin_key_opens_the_other_endpoints_too(guarded):
    for key in (USER, ADMIN):
        answer = guarded.http.post("/v1/completions", json=TEXT, headers=bearer(key))
        assert answer.status_code == 200
    assert guarded.http.get("/is_sleeping", headers=bearer(USER)).status_code == 403
    assert guarded.http.get("/is_sleeping", headers=bearer(ADMIN)).status_code == 200


def test_a_server_whose_api_is_open_may_have_an_admin_key(tiny_folder):
    with live_server.live(tiny_folder, Keys(admin=ADMIN), admin_endpoints=True) as server:
        assert server.http.post("/v1/completions", json=TEXT).status_code == 200
        assert server.http.post("/reset_prefix_cache").status_code == 403
        answer = server.http.post("/reset_prefix_cache", headers=bearer(ADMIN))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://example.com"},
        {"sec-fetch-site": "cross-site"},
        {"host": "name-of-127.example.com"},
        {"x-forwarded-for": "203.0.113.9"},
        {"x-cairn-router": "1"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_without_keys_pages_and_proxies_change_nothing(unguarded, headers):
    for path, body in CHANGES.items():
        assert unguarded.http.post(path, json=body, headers=headers).status_code == 403
    assert unguarded.http.post("/reset_prefix_cache").status_code == 200  # a program of the machine


def test_where_others_could_come_an_admin_key_has_to_be_there():
    users, admin = Keys([("ann", USER)]), Keys([("ann", USER)], admin=ADMIN)
    for host, keys in (("127.0.0.1", Keys()), ("127.0.0.1", admin), ("0.0.0.0", Keys(admin=ADMIN))):
        check_admin_key(True, host, keys)
    for host, keys in (("127.0.0.1", users), ("0.0.0.0", users), ("0.0.0.0", Keys())):
        with pytest.raises(ConfigError, match="no admin key"):
            check_admin_key(True, host, keys)
        check_admin_key(False, host, keys)


def test_the_admin_key_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "admin"
    file.write_text(f"# of the operators\n{ADMIN}\n")
    for keys in (read_keys(None, {}, file), read_keys(None, {"CAIRN_ADMIN_KEY": ADMIN})):
        assert keys.is_admin({"headers": [(b"authorization", b"Bearer " + ADMIN.encode())]})
        assert not keys.is_admin({"headers": [(b"authorization", b"Bearer sk")]})
        assert not keys
    assert not read_keys(None, {}).has_admin
    for wrong in ({"CAIRN_ADMIN_KEY": ""}, {"CAIRN_ADMIN_KEY": "a,b"}):
        with pytest.raises(ConfigError):
            read_keys(None, wrong)
    with pytest.raises(ConfigError, match="API key, too"):
        read_keys(None, {"CAIRN_ADMIN_KEY": "same", "CAIRN_API_KEYS": "ann same"})
