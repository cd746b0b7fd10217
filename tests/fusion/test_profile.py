"""Statistics of measured times, their agreement over ranks, and the costs made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lab.virtual.transport import local_transports
from lightning_safusion.comm.cost import LINKS, LinearCost
from lightning_safusion.fusion.events import host_delays
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import JobShape
from lightning_safusion.fusion.plans.profile import AgreedProfile, fit_exchanges, fit_or_scale, job_costs
from lightning_safusion.fusion.recorder import RECENT_WINDOWS, ProfileRecorder, service_seconds
from tests.comm.exchanges import in_threads

FREE = LinearCost(0.0, 0.0)
PRIOR = {"allgather": LinearCost(1e-4, 4e-9), "allreduce": LinearCost(2e-4, 1e-9)}


def alone(recorder: ProfileRecorder) -> AgreedProfile:
    return recorder.agree(local_transports(1)[0], PRIOR)


def windows(*arrivals: list[float]) -> list[ProfileRecorder]:
    """Ranks that have recorded a window each."""
    recorders = [ProfileRecorder(len(each)) for each in arrivals]
    for recorder, each in zip(recorders, arrivals, strict=True):
        recorder.record_window(each)
    return recorders


def agree_all(recorders: list[ProfileRecorder]) -> list[AgreedProfile]:
    transports = local_transports(len(recorders))
    return in_threads(transports, lambda transport: recorders[transport.rank].agree(transport, PRIOR))


def assert_line(line: LinearCost, fixed: float, per_byte: float, rel: float = 1e-6) -> None:
    assert line.fixed == pytest.approx(fixed, rel=rel)
    assert line.per_byte == pytest.approx(per_byte, rel=rel)


def fitted(
    measured: list[tuple[float, float]], known: dict[str, LinearCost] | None = None
) -> tuple[LinearCost, LinearCost]:
    """The lines after exchanges of the all-gather alone."""
    return fit_exchanges({"allgather": measured, "allreduce": []}, PRIOR, known)


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_arrivals_count_from_the_first_gradient_on_any_clock() -> None:
    recorder = ProfileRecorder(3)
    recorder.record_window([100.0, 100.5, 102.0])
    recorder.record_window([7.0, 7.5, 9.0])
    assert alone(recorder).arrivals == pytest.approx((0.0, 0.5, 2.0))


@pytest.mark.parametrize(
    ("scales", "arrivals"),
    [
        ([50.0 if window % 4 == 0 else 1.0 for window in range(9)], (0.0, 1.0, 2.0)),  # a slow window moves no median
        ([1.0] * 20 + [3.0] * 6, (0.0, 3.0, 6.0)),  # a lasting change is followed
    ],
)
def test_arrivals_are_running_medians(scales: list[float], arrivals: tuple[float, ...]) -> None:
    recorder = ProfileRecorder(3)
    for scale in scales:
        recorder.record_window([0.0, scale, 2.0 * scale])
    assert alone(recorder).arrivals == arrivals


def test_profile_does_not_depend_on_the_plan_it_was_measured_with() -> None:
    """Backward takes a second per tensor; each buffer's selection holds up the tensors behind it."""
    profiles = []
    for stops in ([4], [1, 2, 3, 4], [2, 4]):
        clock, start, arrivals, selections = 0.0, 0, [], []
        for place in range(4):
            clock += 1.0
            arrivals.append(clock)
            if place + 1 in stops:
                seconds = 0.125 + 0.25 * (place + 1 - start)
                selections.append((place + 1, 10 * (place + 1 - start), seconds))
                clock, start = clock + seconds, place + 1
        recorder = ProfileRecorder(4)
        recorder.record_window(arrivals, selections)
        profiles.append(alone(recorder).arrivals)
    assert profiles == [(0.0, 1.0, 2.0, 3.0)] * 3


def test_calls_on_the_host_delay_what_a_device_that_keeps_pace_computes() -> None:
    submitted, worked = np.array([1.0, 2.5, 4.5, 5.0, 5.5]), np.array([0.1, 0.6, 1.6, 1.9, 2.2])
    paced = submitted + 3.0  # by another clock
    assert host_delays(paced, submitted, worked) == pytest.approx(worked - 0.1)
    behind = paced + [0.0, 0.0, 0.0, 0.7, 0.9]  # the device computes longer than the host from the fourth one on
    assert host_delays(behind, submitted, worked) == pytest.approx([0.0, 0.5, 1.5, 1.5, 1.5])
    late = paced + [0.9, 0.7, 0.4, 0.0, 0.0]  # the host is ahead at first
    assert host_delays(late, submitted, worked) == pytest.approx([0.0, 0.0, 0.0, 1.8, 2.1])
    assert not host_delays(np.full(5, math.nan), submitted, worked).any()
    absent = np.where([False, True, False, False, False], math.nan, paced)
    assert host_delays(absent, submitted, worked) == pytest.approx([0.0, 0.0, 1.5, 1.8, 2.1])


def test_a_window_without_gradients_on_this_rank_counts_as_it_does_on_the_others() -> None:
    recorders = windows([0.0, 1.0], [math.nan, math.nan])
    assert [recorder.windows for recorder in recorders] == [1, 1]
    assert [profile.arrivals for profile in agree_all(recorders)] == [(0.0, 1.0)] * 2


def test_times_without_a_gradient_cannot_be_agreed() -> None:
    with pytest.raises(ValueError, match="no rank has recorded"):
        alone(*windows([math.nan] * 3))


def test_service_time_starts_when_the_link_is_free() -> None:
    launched = [0.0, 1.0, 2.0, 10.0]
    finished = [3.0, 4.0, 4.5, 11.0]
    assert service_seconds(launched, finished) == [3.0, 1.0, 0.5, 1.0]


# --- cost lines -------------------------------------------------------------------------------------------------------


def test_lines_are_recovered_from_noisy_samples_with_outliers() -> None:
    rng = np.random.default_rng(0)
    true = {"allgather": LinearCost(3e-4, 5e-9), "allreduce": LinearCost(6e-4, 8e-10)}
    recorder = ProfileRecorder(3)
    recorder.record_window([0.0, 1.0, 2.0])
    for _ in range(30):
        for collective, nbytes in (("allgather", 2_000), ("allgather", 40_000), ("allgather", 900_000)) + (
            ("allreduce", 10_000),
            ("allreduce", 8_000_000),
        ):
            late = 0.05 if rng.random() < 0.1 else 0.0
            recorder.record_exchange(collective, nbytes, true[collective](nbytes) * rng.uniform(0.97, 1.03) + late)
    profile = alone(recorder)
    assert_line(profile.allgather, 3e-4, 5e-9, rel=0.05)
    assert_line(profile.allreduce, 6e-4, 8e-10, rel=0.05)


def test_sizes_that_tell_no_rise_scale_the_prior() -> None:
    prior = LinearCost(1e-4, 1e-9)
    assert_line(fit_or_scale([(50_000, 3 * prior(50_000))] * 5, prior), 3e-4, 3e-9)
    for samples in ([(10_000, 2.0), (11_000, 9.0)], [(1_000, 2.0), (100_000, 1.0)]):  # too alike, or falling
        line = fit_or_scale(samples, prior)
        assert line.per_byte / line.fixed == pytest.approx(prior.per_byte / prior.fixed)
    assert fit_or_scale([], prior) is None


def test_the_collective_in_use_corrects_the_other_one() -> None:
    # Latency three times, bandwidth half of what the calibration saw.
    measured = [(size, 3e-4 + 8e-9 * size) for size in (1_000, 30_000, 1_000_000)]
    allgather, allreduce = fitted(measured)
    assert_line(allgather, 3e-4, 8e-9)
    assert_line(allreduce, 6e-4, 2e-9)
    assert fitted([]) == (PRIOR["allgather"], PRIOR["allreduce"])


def test_a_collective_without_samples_is_never_free() -> None:
    flat = [(20_000, 4e-3), (200_000, 4e-3 + 1e-6)]  # on a busy machine a message of any size takes this long
    steep = [(20_000, 2e-5), (200_000, 2e-4)]
    for measured in (flat, steep):
        _, allreduce = fitted(measured)
        assert allreduce.fixed >= 0.5 * PRIOR["allreduce"].fixed
        assert allreduce.per_byte >= 0.5 * PRIOR["allreduce"].per_byte


def test_a_slow_link_is_not_taken_for_a_slow_start() -> None:
    known = {"allgather": LinearCost(5e-4, 1e-9), "allreduce": LinearCost(5e-4, 1e-9)}

    def slow(size: float, late: float = 0.0) -> tuple[float, float]:
        return size, 5e-4 + 1e-8 * size + late

    # ten times slower than known; the small message had to wait for something else
    measured = [slow(20_000, 0.01), slow(200_000)] * 8
    line, _ = fitted(measured, known)
    assert line.fixed == pytest.approx(1e-3)
    assert line.per_byte == pytest.approx(1e-8, rel=0.3)
    # of one size alone
    line, _ = fitted([slow(200_000)] * 8, known)
    assert (line.fixed, line.per_byte) == pytest.approx((1e-3, 7.5e-9), rel=1e-6)


@pytest.mark.parametrize(
    ("known", "fixed"), [(LinearCost(5e-4, 1e-9), 0.01), (LinearCost(0.0, 1.2e-8), 2e-3)], ids=["slower", "hidden"]
)
def test_a_start_that_is_slow_indeed_is_believed_in_the_end(known: LinearCost, fixed: float) -> None:
    """Also where noise had hidden that there is any latency."""
    measured = [(size, fixed + 1e-8 * size) for size in (2e4, 2e5)] * 8
    for _ in range(9):
        known, _ = fitted(measured, {"allgather": known, "allreduce": known})
    assert_line(known, fixed, 1e-8)


def test_exchanges_of_one_size_scale_the_line_that_was_agreed_before() -> None:
    recorder, transport = ProfileRecorder(2), local_transports(1)[0]
    prior = {"allgather": LinearCost(1e-3, 1e-9), "allreduce": LinearCost(1e-3, 1e-9)}
    recorder.record_window([0.0, 1.0])
    for nbytes in (1000, 1_000_000):
        recorder.record_exchange("allgather", nbytes, 1e-4 + 1e-8 * nbytes)
    before = recorder.agree(transport, prior)
    for _ in range(RECENT_WINDOWS):  # the link has become three times as slow, and the plan has one buffer
        recorder.record_window([0.0, 1.0])
        recorder.record_exchange("allgather", 1_000_000, 3 * (1e-4 + 1e-8 * 1_000_000))
    after = recorder.agree(transport, prior, known=before).allgather
    # as slow as measured; a latency that is more than twice what it was needs more to be believed
    assert after(1_000_000) == pytest.approx(3 * before.allgather(1_000_000))
    assert after.fixed == pytest.approx(2e-4)


# --- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_ranks_hold_the_same_bits(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    recorders = []
    for _ in range(world_size):
        recorder = ProfileRecorder(3)
        for _ in range(int(rng.integers(1, 9))):
            stop = int(rng.integers(1, 4))
            selection = (stop, 1000 * stop, rng.uniform(0, 1e-3))
            recorder.record_window(np.sort(rng.uniform(0, 1, 3)), [selection])
            recorder.record_decode(100 * stop, rng.uniform(0, 1e-3))
        for number in range(int(rng.integers(20, 40))):
            recorder.record_exchange("allgather", 1000 * (1 + number % 4), rng.uniform(0, 1e-3))
        recorders.append(recorder)
    profiles = agree_all(recorders)
    reference = profiles[0].to_vector().tobytes()
    assert all(profile.to_vector().tobytes() == reference for profile in profiles)
    shape = shape_of([5, 6, 7], world_size)
    digests = {plan_optimal(job_costs(shape, "auto", profile, PRIOR)).digest for profile in profiles}
    assert len(digests) == 1


def test_gradients_are_ready_when_the_slowest_rank_has_them() -> None:
    recorders = windows([0.0, 1.0, 5.0], [0.0, 2.0, 4.0])
    assert agree_all(recorders)[0].arrivals == (0.0, 2.0, 5.0)


def test_a_rank_without_measurements_follows_the_others() -> None:
    recorders = [ProfileRecorder(3) for _ in range(2)]
    recorders[0].record_window([0.0, 1.0, 5.0], [(3, 1000, 1e-3)])
    first, second = agree_all(recorders)
    assert first == second
    assert first.arrivals == (0.0, 1.0, 5.0)
    assert first.select(1000) == pytest.approx(1e-3)


def test_an_exchange_took_as_long_as_the_rank_that_came_last_saw() -> None:
    """The others launched early and waited: what they saw is their own earliness."""
    rng = np.random.default_rng(1)
    recorders = windows([0.0], [0.0], [0.0])
    for number in range(60):
        nbytes = (1_000, 50_000, 2_000_000)[number % 3]
        early = rng.uniform(1e-3, 1e-1, 3)
        early[rng.integers(3)] = 0.0
        for recorder, seconds in zip(recorders, early, strict=True):
            recorder.record_exchange("allgather", nbytes, 2e-4 + 6e-9 * nbytes + seconds)
    assert_line(agree_all(recorders)[0].allgather, 2e-4, 6e-9)


def test_ranks_may_have_read_different_numbers_of_results() -> None:
    """On an accelerator results come late: what only some ranks have is left for the next agreement."""
    recorders = windows([0.0], [0.0])
    for rank, recorder in enumerate(recorders):
        for number in range(600 - 7 * rank):  # more than are kept
            nbytes = (1_000, 80_000)[number % 2]
            recorder.record_exchange("allreduce", nbytes, 1e-4 + 2e-9 * nbytes + 1e-3 * (number % 5 == rank))
    assert_line(agree_all(recorders)[0].allreduce, 1e-4, 2e-9)


def test_a_missing_measurement_does_not_shift_the_others() -> None:
    recorders = windows([0.0], [0.0])
    for rank, recorder in enumerate(recorders):
        for number in range(12):
            nbytes = (1_000, 80_000, 500_000)[number % 3]
            lost = rank == 1 and number % 4 == 0
            recorder.record_exchange("allgather", nbytes, math.nan if lost else 1e-4 + 2e-9 * nbytes)
    assert_line(agree_all(recorders)[0].allgather, 1e-4, 2e-9)


def test_local_work_takes_as_long_as_on_the_slowest_rank() -> None:
    recorders = [ProfileRecorder(1) for _ in range(2)]
    for rank, recorder in enumerate(recorders):
        for elements in (1_000, 100_000):
            seconds = (1 + rank) * (1e-5 + 1e-9 * elements)
            recorder.record_window([0.0], [(1, elements, seconds)])
            recorder.record_decode(elements, 3 * seconds)
    profile = agree_all(recorders)[0]
    assert_line(profile.select, 2e-5, 2e-9)
    assert_line(profile.decode, 6e-5, 6e-9)


def test_the_vector_is_reduced_as_float64() -> None:
    recorder = ProfileRecorder(2)
    recorder.record_window([0.0, 1.0 + 1e-12])
    empty = ProfileRecorder(2).to_vector()
    assert recorder.to_vector().dtype == np.float64
    assert len(recorder.to_vector()) == len(empty)
    assert not np.isnan(empty).any()
    assert alone(recorder).arrivals == (0.0, float(torch.tensor(1.0 + 1e-12, dtype=torch.float64)))


def test_agreed_profile_survives_its_vector() -> None:
    profile = AgreedProfile(
        (0.0, 0.1, -math.inf), LinearCost(1, 2), LinearCost(3, 4), LinearCost(5, 6), LinearCost(7, 8)
    )
    assert AgreedProfile.from_vector(profile.to_vector()) == profile


# --- costs ------------------------------------------------------------------------------------------------------------


def shape_of(numels: list[int], world_size: int) -> JobShape:
    """float32 tensors that may send a twentieth of their elements, in entries of 8 bytes."""
    return JobShape(tuple(numels), (4,) * len(numels), tuple(n // 20 for n in numels), world_size, 8.0)


def test_costs_add_selection_and_decoding() -> None:
    profile = AgreedProfile(
        arrivals=(0.0, 1.0, 3.0),
        select=LinearCost(0.5, 0.01),
        decode=LinearCost(0.25, 2.0),
        allgather=LinearCost(1.0, 3.0),
        allreduce=LinearCost(4.0, 0.5),
    )
    shape = shape_of([20, 0, 40], 4)
    costs = job_costs(shape, "auto", profile, None)
    assert costs.sparse_bytes == (9.0, 1.0, 17.0)  # one more for the header
    assert costs.dense_bytes == (80.0, 0.0, 160.0)
    assert costs.ready == pytest.approx((18.2, 21.2, 57.6))
    assert costs.sparse == (1.0, 3.0)
    assert costs.per_buffer == 0.75
    assert costs.dense == (4.0, 0.5)
    assert job_costs(shape, "allreduce", profile, None).ready == (0.0, 1.0, 3.0)


def test_ready_times_rise_and_absent_tensors_delay_nothing() -> None:
    profile = AgreedProfile((-math.inf, 0.0, 2.0, 1.0, -math.inf), *[FREE] * 4)
    assert job_costs(shape_of([20] * 5, 2), "auto", profile, None).ready == (0.0, 0.0, 2.0, 2.0, 2.0)


def test_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="of 1 tensors, got the sizes of 2"):
        job_costs(shape_of([1, 2], 2), "auto", AgreedProfile((0.0,), *[FREE] * 4), None)


def test_modelled_costs_follow_sizes_and_link() -> None:
    costs = job_costs(shape_of([100, 0, 300], 8), "auto", None, None)
    assert costs.ready == pytest.approx((3e-8, 3e-8, 1.2e-7))
    link = LINKS["10gbit"]
    assert costs.sparse == pytest.approx((link.launch + 3 * link.alpha, 7 * link.beta))
    assert costs.dense == pytest.approx((link.launch + 6 * link.alpha, 2 * 7 / 8 * link.beta))
    calibrated = job_costs(shape_of([100, 0, 300], 8), "auto", None, PRIOR)
    assert (calibrated.sparse, calibrated.dense) == ((1e-4, 4e-9), (2e-4, 1e-9))
    assert job_costs(shape_of([], 2), "auto", None, None).ready == ()
