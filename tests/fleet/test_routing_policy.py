import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.fleet.config import RouterConfig, read_fleet
from cairn.fleet.router import NO_KEYS, Router
from cairn.fleet.routing_policy import POLICIES, Arrivals, Ask, Candidate, best, seconds
from cairn.fleet.worker import Worker
from cairn.serve.text_keys import read_fields

candidates = st.lists(
    st.builds(Candidate, cached_tokens=st.integers(0, 5000), queued_tokens=st.integers(0, 50_000),
              running=st.integers(0, 300), waiting=st.integers(0, 300)), min_size=1, max_size=8)  # fmt: skip


@given(candidates, st.integers(1, 20_000), st.integers(0, 1000), st.sampled_from(sorted(POLICIES)))
def test_every_policy_has_a_cost_for_every_server_and_ties_go_to_the_idlest(
    servers, prompt, number, name
):
    place, costs = best(POLICIES[name], Ask(number, prompt), servers)
    assert len(costs) == len(servers)
    equal = [one.requests for one, cost in zip(servers, costs, strict=True) if cost == min(costs)]
    assert costs[place] == min(costs)
    assert servers[place].requests == min(equal)


@given(
    st.builds(Candidate, queued_tokens=st.integers(0, 9000), running=st.integers(0, 200)),
    st.integers(64, 9000),
)
def test_more_cached_and_less_queued_never_cost_more_seconds(one, prompt):
    ask = Ask(0, prompt)

    def cost(**changes):
        fields = {name: getattr(one, name) for name in Candidate.__struct_fields__}
        return seconds(ask, [Candidate(**(fields | changes))])[0]

    assert cost(cached_tokens=prompt // 2) <= cost(cached_tokens=0)
    assert cost() <= cost(queued_tokens=one.queued_tokens + 1000)
    assert cost() <= cost(running=one.running + 1)


def test_seconds_leaves_a_warm_server_only_when_its_queue_costs_more_than_computing():
    warm, cold = Candidate(cached_tokens=8000, queued_tokens=1000), Candidate()
    assert best(seconds, Ask(0, 8192), [cold, warm])[0] == 1
    warm.queued_tokens = 20_000
    assert best(seconds, Ask(0, 8192), [cold, warm])[0] == 0


@given(st.floats(0.001, 2), st.floats(0.01, 2), st.floats(0, 20), st.floats(0, 0.9))
def test_who_arrives_behind_a_prompt_waits_as_long_as_in_a_queue(queued_s, prompt_s, rate, busy):
    empty_s = (queued_s + prompt_s) / (1 - busy)  # they bring work themselves
    times = [(at + 0.5) / 500 * empty_s for at in range(500)]  # evenly
    left = [(1 - busy) * time for time in times]
    waits = [queued_s + prompt_s - gone - max(queued_s - gone, 0) for gone in left]
    counted = rate * empty_s * sum(waits) / len(waits)

    def cost(arrivals_per_s):
        server = Candidate(queued_tokens=100, token_s=queued_s / 100)
        ask = Ask(0, 1000, 1, arrivals_per_s, busy)
        server.cached_tokens = 1000 - prompt_s / server.token_s
        return seconds(ask, [server])[0]

    if prompt_s >= queued_s / 100:  # at least one token
        assert cost(rate) - cost(0.0) == pytest.approx(counted, rel=1e-2, abs=1e-9)


def test_a_rush_is_believed_for_as_long_as_it_was_seen():
    server = Candidate(queued_tokens=1000, token_s=1e-3)

    def behind(seen_s):
        asks = [Ask(0, 500, 1, rate, 0.9, seen_s) for rate in (2.0, 0.0)]
        with_them, alone = (seconds(ask, [server])[0] for ask in asks)
        return with_them - alone

    assert behind(3.0) == pytest.approx(2.0 * 0.5 * (1.25 + 3.0))
    assert behind(100.0) == behind(1e9) == pytest.approx(2.0 * 0.5 * 12.5)


def test_a_request_costs_those_who_answer_half_of_its_prompt_and_of_its_rows():
    ask, idle = Ask(0, 1000, 100), Candidate(step_s=0.0)
    busy = Candidate(step_s=0.0, running=3, waiting=1)
    more = seconds(ask, [busy])[0] - seconds(ask, [idle])[0]
    assert more == pytest.approx(4 * (1000 * busy.token_s + 100 * busy.row_s) / 2)


def test_rate_and_work_are_those_of_the_last_arrivals():
    arrivals = Arrivals()

    def come(times, work_s):
        for at in times:
            ask = arrivals.ask(0, 100, 20, at, share=0.5)
            arrivals.sent(ask, Candidate(0, token_s=work_s / 200, row_s=work_s / 40))
        return ask.arrivals_per_s, ask.busy_share

    assert come([1.0], 0.2) == (0.0, 0.0)
    assert come([1.0 + at for at in range(1, 100)], 0.2) == pytest.approx((0.5, 0.1))
    assert come([100.0 + at / 10 for at in range(1, 100)], 0.1) == pytest.approx((5.0, 0.5))


def test_the_router_counts_what_computes_over_all_of_its_processes():
    router = Router(RouterConfig(), [])
    router.workers = [Worker(0, "http://a:1"), Worker(1, "http://b:1")]
    router.processes = ["http://x:1", "http://x:2", "http://x:3"]
    rates = [
        router.ask(at, NO_KEYS, None, at / 10, computes).arrivals_per_s
        for at, computes in enumerate([True, False, False, False, True])
    ]
    assert rates == pytest.approx([0, 0, 0, 0, 2.5 * 3 / 2])


@pytest.mark.parametrize("asked_for", [10**30, 10**400])
def test_a_request_for_endless_tokens_is_chosen_for_and_soon_forgotten(asked_for):
    router = Router(RouterConfig(), [])
    router.workers = [Worker(0, "http://a:1"), Worker(1, "http://b:1")]
    usual, endless = (
        read_fields(b'{"max_tokens": %d, "prompt": "hi"}' % n) for n in (256, asked_for)
    )

    def come(asked, times):
        for at in times:
            ask = router.ask(at, NO_KEYS, asked.wanted_tokens, float(at))
            router.choose(ask, NO_KEYS, router.workers, float(at))
        return ask.busy_share

    before = come(usual, range(100))
    come(endless, [100])
    assert come(usual, range(101, 201)) == pytest.approx(before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[servers]]\nmodel='x'\ncout=2", "did you mean 'count'"),
        ("[router]\npolicy='second'\n[[servers]]\nmodel='x'", "seconds"),
        ("[[servers]]\nmodel='x'\nurls=['http://a']", "give `model`"),
        ("servers = []", "no servers"),
        ("servers = 3", "servers: expected tables, [[servers]], got 3"),
        ("router = 1\n[[servers]]\nmodel='x'", "router: expected a table"),
        ("[router]\nport = 5", "'servers' is missing"),
        ("[router]\nport=70000\n[[servers]]\nmodel='x'", "integer >= 0 and <= 65535, got 70000"),
        ("[router]\nhold_s=nan\n[[servers]]\nmodel='x'", "router.hold_s: expected a number >= 0"),
        ("[[servers]]\nmodel='x'\ncount='2'", "servers[0].count: expected an integer"),
        ("[[aliases]]\nname='a'\n[[servers]]\nmodel='x'", "'aliases[0].model' is missing"),
        ("[[servers]]\nurls=['http://a:99999']", "no port up to 65535"),
        ("[[servers]]\nurls=['http://']", "has no host"),
        ("[[servers]]\ndns='a'", "dns is 'a'"),
        ("[[servers]]\ndns='a:99999'", "dns is 'a:99999'"),
    ],
)
def test_a_wrong_file_names_the_mistake(tmp_path, text, said):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_fleet(file)
    assert said in str(error.value) + (error.value.hint or "")
