"""Which models are awake: never more than fit, whoever waits comes to its turn, and pins hold."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.fleet.residency import TURN_S, Resident, check_room, plan

MEMORY = 100
MODEL = st.builds(
    Resident,
    name=st.just(""),
    bytes=st.integers(20, 60),
    asleep_bytes=st.integers(0, 5),
    pinned=st.just(False),
)


class Machine:
    """Carries out plans as a host does, and refuses what a machine could not do."""

    def __init__(self, models):
        self.models = {one.name: one for one in models}
        self.now = 0.0

    def change(self, name, **fields):
        self.models[name] = msgspec.structs.replace(self.models[name], **fields)

    def look(self, idle_s=1e9):
        moves = plan(list(self.models.values()), MEMORY, self.now, idle_s)
        for name in moves.sleep:
            one = self.models[name]
            assert one.awake
            assert not one.busy
            assert not one.pinned
            self.change(name, awake=False)
        for name in moves.wake:
            self.change(name, awake=True, waiting_since_s=None, used_s=self.now)
        assert sum(one.held for one in self.models.values()) <= MEMORY
        return moves


@given(st.lists(MODEL, min_size=2, max_size=5), st.lists(st.integers(0, 4), max_size=12))
def test_everybody_who_waits_is_awake_in_the_end_and_nothing_is_overfull(models, asked):
    named = [msgspec.structs.replace(one, name=str(at)) for at, one in enumerate(models)]
    machine = Machine(named)
    for number in [*asked, 0]:
        name = str(number % len(named))
        if machine.models[name].awake:
            machine.change(name, busy=1, used_s=machine.now)
            continue
        machine.change(name, waiting_since_s=machine.now)
        machine.now += TURN_S + 1
        for other in machine.look().yielding:  # it takes nothing new, and so ends
            machine.change(other, busy=0)
        machine.look()
        assert machine.models[name].awake


def test_a_busy_model_keeps_its_place_for_a_turn_and_an_idle_one_sleeps_first():
    machine = Machine(
        [
            Resident(name="busy", bytes=40, awake=True, busy=2, used_s=1.0),
            Resident(name="idle", bytes=40, awake=True, used_s=5.0),
            Resident(name="new", bytes=50, waiting_since_s=10.0),
        ]
    )
    machine.now = 10.0
    assert machine.look().sleep == ["idle"]
    machine.change("busy", waiting_since_s=None)
    machine.change("idle", waiting_since_s=11.0)
    machine.change("new", busy=1)
    machine.now = 11.0 + TURN_S / 2
    assert machine.look().yielding == []
    machine.now = 11.0 + TURN_S
    assert machine.look().yielding == ["busy"]  # used longest ago


def test_idle_models_sleep_pinned_ones_do_not():
    machine = Machine(
        [
            Resident(name="a", bytes=40, awake=True, pinned=True),
            Resident(name="b", bytes=40, awake=True, used_s=50.0),
        ]
    )
    machine.now = 100.0
    assert machine.look(idle_s=60).sleep == []
    assert machine.look(idle_s=50).sleep == ["b"]


def test_a_model_that_can_never_be_awake_is_refused_with_the_numbers():
    models = [
        Resident(name="a", bytes=60 << 30, pinned=True),
        Resident(name="b", bytes=50 << 30),
    ]
    with pytest.raises(ConfigError, match="b needs 50 GiB, and the others keep 60 GiB at all"):
        check_room(models, 100 << 30)
    check_room(models, 110 << 30)
