"""How long who waits sleeps: no longer than a quarter of the silence, where no bell may ring."""

from hypothesis import given
from hypothesis import strategies as st

from mpiml.seat import nap as nap_us

silences = st.floats(0.0, 100.0)


@given(silences)
def test_naps_grow_with_the_silence_where_other_hosts_are(silent):
    nap = nap_us(1000.0, silent, False, True, None)
    assert 20 <= nap <= 4000
    assert nap <= max(20, silent * 0.25e6)
    assert nap <= nap_us(1000.0, silent, False, False, None)


@given(silences, st.booleans())
def test_transfers_and_deadlines_shorten_a_nap(silent, far):
    assert nap_us(1000.0, silent, True, far, None) == 20
    assert nap_us(1000.0, silent, False, far, 1000.0 + 5e-6) <= 6


def test_where_bells_ring_a_nap_is_long_at_once():
    assert nap_us(0.0, 0.0, False, False, None) == 1000
    assert nap_us(0.0, 1.5, False, False, None) == 4000


def test_ranks_that_are_many_for_a_core_look_more_seldom():
    def one(crowd, silent=0.1, busy=False):
        return nap_us(100.0, silent, busy, False, None, crowd)

    assert one(1.0) == one(2.5) == 1000
    assert one(64.0) == 25_600  # 64 looks of 40 us: a tenth of that
    assert one(64.0, silent=2.0) == 4 * one(64.0)
    assert one(64.0, busy=True) == 512
    assert nap_us(100.0, 0.1, False, False, 100.001, 64.0) <= 1001
