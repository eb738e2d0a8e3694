import jax.numpy as jnp
import numpy as np
import pytest

from jaxbuf.train.schedule import ClockPace, Phase, Rate, StepPace, phase_at


def test_the_rate_warms_up_and_decays_to_its_end():
    rate = Rate(3e-3, warmup=0.1, final=0.01)
    progress = jnp.linspace(0, 1, 101, dtype=jnp.float32)
    values = np.asarray(rate(progress))
    assert values[0] == 0
    np.testing.assert_allclose(values[5], 1.5e-3, rtol=1e-5)
    np.testing.assert_allclose(values[10], 3e-3, rtol=1e-5)
    np.testing.assert_allclose(values[55], 3e-3 * 0.505, rtol=1e-4)
    np.testing.assert_allclose(values[-1], 3e-5, rtol=1e-3)
    assert np.all(np.diff(values[10:]) < 0)


def test_phases_divide_the_run():
    phases = (Phase(0.8, 8, 2), Phase(1.0, 16, 1))
    assert [phase_at(phases, progress) for progress in (0.0, 0.79, 0.8, 0.99)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"the last at 1.0, got \[0.8\]"):
        phase_at(phases[:1], 0.1)


@pytest.mark.parametrize("steps,block", [(100, 16), (7, 4), (1, 8), (33, 1)])
def test_steps_are_all_taken_and_phases_end_where_they_should(steps, block):
    pace, progress, taken = StepPace(steps), 0.0, 0
    while progress < 1.0:
        until = 0.6 if progress < 0.6 else 1.0
        count, after = pace.advance(progress, until, block)
        assert 1 <= count <= block and after > progress
        progress, taken = after, taken + count
        if progress == 0.6:
            assert taken == max(1, round(0.6 * steps))
    assert steps <= taken <= steps + 1


@pytest.mark.parametrize("first,second", [(1.0, 1.0), (0.3, 4.0), (7.0, 0.5)])
def test_a_clock_ends_on_time_with_all_progress_made(first, second):
    now = [100.0]
    pace, progress, seen = ClockPace(400.0, clock=lambda: now[0]), 0.0, []
    while progress < 1.0:
        until = 0.8 if progress < 0.8 else 1.0
        _, progress = pace.advance(progress, until, 16)
        seen.append(progress)
        now[0] += first if until < 1 else second
        if progress == 0.8:
            assert abs(now[0] - 100 - 320) < 3 * first
    assert seen == sorted(set(seen))
    assert 400 - 3 * second < now[0] - 100 <= 400 + second
