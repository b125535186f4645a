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
