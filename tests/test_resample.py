"""resample_on_correct against its specification."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from minirstar import resample_on_correct

GROUP = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.5, -1.0]), st.floats(0, 2)), min_size=1, max_size=33)
SELECT = st.sampled_from(["weighted", "lowest"])


def draw(group, keep, seed=0, **options) -> list[int]:
    rewards, penalties = zip(*group)
    return resample_on_correct(rewards, penalties, keep, np.random.default_rng(seed), **options)


def expected_right(n: int, right: int, keep: int, min_each: int) -> int:
    """The specification, word by word."""
    keep = min(keep, n)
    k = {"right": round(keep * right / n)}
    k["wrong"] = keep - k["right"]
    available = {"right": right, "wrong": n - right}
    for side, other in (("right", "wrong"), ("wrong", "right")):
        least = min(min_each, available[side], keep // 2)
        if k[side] < least:
            k[side], k[other] = least, keep - least
    return k["right"]


@given(GROUP, st.integers(1, 40), SELECT, st.integers(0, 4), st.integers(0, 99))
def test_sizes_of_both_sides(group, keep, select, min_each, seed):
    chosen = draw(group, keep, seed, select=select, min_each=min_each)
    right = sum(reward > 0 for reward, _ in group)
    assert len(chosen) == min(keep, len(group))
    assert chosen == sorted(set(chosen)) and all(type(i) is int and 0 <= i < len(group) for i in chosen)
    assert sum(group[i][0] > 0 for i in chosen) == expected_right(len(group), right, keep, min_each)


@given(GROUP, st.integers(0, 50), SELECT)
def test_keeping_all_or_more_gives_all(group, more, select):
    assert draw(group, len(group) + more, select=select) == list(range(len(group)))


@given(GROUP, st.integers(1, 33), SELECT, st.integers(0, 99))
def test_same_generator_state_gives_the_same_choice(group, keep, select, seed):
    assert draw(group, keep, seed, select=select) == draw(group, keep, seed, select=select)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=33
    ),
    st.integers(1, 33),
)
def test_lowest_takes_the_lowest_penalties_ties_by_index(group, keep):
    chosen = [i for i in draw(group, keep, select="lowest") if group[i][0] > 0]
    order = sorted((i for i, (reward, _) in enumerate(group) if reward > 0), key=lambda i: (group[i][1], i))
    assert chosen == sorted(order[: len(chosen)])


def test_each_side_keeps_at_least_two_where_it_has_them():
    assert sum(i == 0 or i == 1 for i in draw([(1, 0)] * 2 + [(0, 0)] * 30, 16)) == 2
    assert sum(i == 0 or i == 1 for i in draw([(0, 0)] * 2 + [(1, 0)] * 30, 16)) == 2
    assert 0 in draw([(1, 0)] + [(0, 0)] * 31, 16)


def test_halves_round_to_even():
    assert sum(i < 1 for i in draw([(1, 0)] + [(0, 0)] * 3, 2, min_each=0)) == 0  # 0.5
    assert sum(i < 3 for i in draw([(1, 0)] * 3 + [(0, 0)], 2, min_each=0)) == 2  # 1.5


def frequencies(group, keep, **options):
    rewards, penalties = zip(*group)
    rng, counts, n = np.random.default_rng(7), np.zeros(len(group)), 6000
    for _ in range(n):
        counts[resample_on_correct(rewards, penalties, keep, rng, **options)] += 1
    return counts / n


def test_weight_of_a_right_one_is_the_inverse_of_its_penalty():
    # one right one is kept of two: the probability of each is its share of the weights 1 / (p + 0.1)
    seen = frequencies([(1, 0.0), (1, 0.4), (0, 0), (0, 0)], 2, min_each=1)
    assert abs(seen[0] - (1 / 0.1) / (1 / 0.1 + 1 / 0.5)) < 0.025  # 4 standard deviations
    assert abs(seen[0] + seen[1] - 1) < 1e-12


def test_low_penalties_are_kept_more_often_and_none_never():
    seen = frequencies([(1, p) for p in (0.0, 0.25, 0.5, 1.0, 2.0)] + [(0, 0)] * 3, 4)
    assert (np.diff(seen[:5]) < -0.02).all() and seen[4] > 0.05


def test_wrong_ones_are_drawn_uniformly_whatever_their_penalty():
    seen = frequencies([(1, 0)] * 4 + [(0, p) for p in (0.0, 0.5, 1.0, 2.0)], 4)
    assert np.abs(seen[4:] - 0.5).max() < 0.03
    lowest = frequencies([(1, 0)] * 4 + [(0, p) for p in (0.0, 0.5, 1.0, 2.0)], 4, select="lowest")
    assert np.abs(lowest[4:] - 0.5).max() < 0.03


@pytest.mark.parametrize(
    "rewards, penalties, keep, options",
    [
        ([], [], 1, {}),
        ([1.0], [0.0, 1.0], 1, {}),
        ([1.0, 0.0], [0.0], 1, {}),
        ([1.0], [0.0], 0, {}),
        ([1.0], [0.0], -1, {}),
        ([[1.0]], [[0.0]], 1, {}),
        (1.0, 0.0, 1, {}),
        ([1.0], [0.0], 1, {"select": "highest"}),
    ],
)
def test_bad_arguments_are_refused(rewards, penalties, keep, options):
    with pytest.raises(ValueError):
        resample_on_correct(rewards, penalties, keep, np.random.default_rng(0), **options)
