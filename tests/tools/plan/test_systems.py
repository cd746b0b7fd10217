"""The systems on the clock: what they send, in which order they come out, and what jitter does to them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lab.papers.simulated import PUBLISHED
from lightning_safusion.comm.cost import LINKS
from lightning_safusion.fusion.plans.adaptive import plan_optimal
from lightning_safusion.fusion.plans.costs import SelectionCost, ddp_buckets
from lightning_safusion.fusion.plans.pricing import predict_finish
from lightning_safusion.tools.plan.cluster import Cluster
from lightning_safusion.tools.plan.device import DEVICES
from lightning_safusion.tools.plan.job import Job, line
from lightning_safusion.tools.plan.models import WHOLE
from lightning_safusion.tools.plan.schedule import Iteration
from lightning_safusion.tools.plan.systems import build_schedule, is_counted, run_system
from lightning_safusion.tools.plan.traces import resolve_trace

load = cache(resolve_trace)


def run(name: str, job: Job, iterations: int = 1) -> Iteration:
    return run_system(name, job, iterations)


@cache
def lstm(nodes: int = 4, gpus: int = 1) -> Job:
    return Job(load("lstm"), Cluster(nodes, gpus, LINKS["1gbit"]), 0.01)


@pytest.mark.parametrize("name", WHOLE.compared)
def test_every_system_runs_on_every_shape_of_cluster(name: str) -> None:
    for cluster in ((1, 1), (3, 1), (2, 4)):
        job = lstm(*cluster)
        result = run(name, job)
        assert result.seconds >= job.trace.seconds - 1e-12
        assert (result.nbytes > 0) == (cluster != (1, 1))
        schedule = build_schedule(name, job)
        if schedule.messages and name != "easgd":
            covered = {place for message in schedule.messages for place in message.tensors}
            assert covered == set(range(len(job.numels)))


DENSE = ["ddp", "wfbp-dense", "horovod-dense", "mgwfbp", "dear", "easgd", "safusion[collective=allreduce]"]


@pytest.mark.parametrize("name", DENSE)
def test_dense_systems_send_everything_once(name: str) -> None:
    job = lstm()
    assert run(name, job).nbytes == pytest.approx(2 * 3 / 4 * 4 * job.numels.sum())
    assert run("ddp-bf16", job).nbytes == pytest.approx(2 * 3 / 4 * 2 * job.numels.sum())


@pytest.mark.parametrize("name", ["wfbp", "horovod", "omgs", "cupcake", "syncea", "behind", "fgbuff", "saf-inter"])
def test_sparse_systems_gather_the_same_entries(name: str) -> None:
    job = lstm()
    assert run(name, job).nbytes == pytest.approx(3 * 6 * job.entries.sum())


@pytest.mark.parametrize(("name", "rank"), [("powersgd", 1), ("powersgd-rank4", 4)])
def test_powersgd_sends_factors(name: str, rank: int) -> None:
    job = lstm()
    matrices = [tensor.shape for tensor in job.trace.tensors if len(tensor.shape) == 2]
    vectors = sum(tensor.numel for tensor in job.trace.tensors if len(tensor.shape) == 1)
    factors = sum(rank * (rows + columns) for rows, columns in matrices)
    assert run(name, job).nbytes == pytest.approx(2 * 3 / 4 * 4 * (factors + vectors))


def test_adtopk_sends_at_least_one_element_of_every_row() -> None:
    trace = load("resnet-50")
    job = Job(trace, Cluster(2), 0.001, 4.0)
    schedule = build_schedule("adtopk", job)
    first = next(place for place, tensor in enumerate(trace.tensors) if tensor.name == "conv1.weight")
    assert trace.tensors[first].shape == (64, 3, 7, 7)
    # rows of three input channels: one element of each of the 64 x 7 x 7 rows
    assert schedule.messages[first].cost.nbytes == 64 * 7 * 7 * 4
    # the density that comes out was computed from the shapes before
    dense = sum(tensor.numel for tensor in trace.tensors if len(tensor.shape) == 1)
    matrices = sum(trace.numels) - dense
    sent = (run("adtopk", job).nbytes - 2 * 1 / 2 * 4 * dense) / 4
    assert sent / matrices == pytest.approx(0.00246, rel=0.01)


def test_buckets_close_with_the_tensor_that_fills_them() -> None:
    mib = 2.0**20
    assert ddp_buckets([0.5 * mib, 0.5 * mib, 20 * mib, 4 * mib, 30 * mib, mib]) == [2, 5, 6]


def test_the_exact_programme_is_not_beaten_by_other_groupings_of_the_same_messages() -> None:
    for link in ("10gbit", "25gbit"):
        job = Job(load("resnet-50"), Cluster(16, 1, LINKS[link], device=PUBLISHED["exact"]), 0.01, 8, segmented=False)
        best = run("safusion", job).seconds
        for name in ("wfbp", "horovod", "saf-inter", "safusion-paper"):
            assert best <= run(name, job).seconds * (1 + 1e-9)


def test_pipelining_overlap_and_merging_pay_where_they_should() -> None:
    slow = Job(load("bert-base"), Cluster(8, 1, LINKS["10gbit"], device=PUBLISHED["threshold"]), 0.01)
    assert run("safusion", slow).seconds < run("syncea", slow).seconds
    assert run("safusion", slow).seconds < run("wfbp", slow).seconds
    assert run("mgwfbp", slow).seconds < run("wfbp-dense", slow).seconds
    assert run("dear", slow).seconds < run("ddp", slow).seconds
    assert run("omgs", slow).seconds < run("cupcake", slow).seconds
    # messages of 64 workers in a slow network: a sum needs less than all contributions
    many = replace(slow, cluster=replace(slow.cluster, nodes=64))
    assert run("oktopk", many).seconds < run("syncea", many).seconds


@pytest.mark.parametrize(("link", "hidden"), [("200gbit-rdma", True), ("100mbit", False)])
def test_elastic_averaging_hides_behind_forward_and_backward(link: str, hidden: bool) -> None:
    job = Job(load("bert-base"), Cluster(8, 1, LINKS[link]))
    trace, result = job.trace, run("easgd", job)
    nbytes = 4 * sum(trace.numels)
    exchange = job.cluster.allreduce(nbytes).seconds
    update = 9 * nbytes / job.cluster.device.memory
    assert (exchange < trace.seconds - trace.optimizer) == hidden
    assert result.seconds == pytest.approx(max(exchange, trace.seconds - trace.optimizer) + update + trace.optimizer)
    assert result.collectives == 1
    assert result.waited == 0


def test_hipress_compresses_large_tensors() -> None:
    job = Job(load("vgg-19"), Cluster(8, 1, LINKS["10gbit"]), 0.01)
    schedule = build_schedule("hipress", job)
    compressed = {message.tensors[0] for message in schedule.messages if message.select > 0}
    assert min(job.numels[list(compressed)]) > max(
        job.numels[place] for place in range(len(job.numels)) if place not in compressed
    )
    largest = int(job.numels.argmax())
    assert sum(largest in message.tensors for message in schedule.messages) > 1
    assert run("hipress", job).seconds < run("ddp", job).seconds


@pytest.mark.slow
def test_espresso_is_not_slower_than_its_first_choice() -> None:
    job = Job(load("bert-base"), Cluster(8, 1, LINKS["10gbit"]), 0.01)
    assert run("espresso", job).seconds <= run("wfbp-dense", job).seconds
    # nothing to win: nothing is compressed
    assert run("espresso", Job(load("resnet-50"), Cluster(2, 1, LINKS["200gbit-rdma"]))).select == 0


def test_espresso_selects_on_the_host_where_the_device_is_slow() -> None:
    slow = SelectionCost(5e-3, 0.0)
    quick = replace(DEVICES["a100"], selection=slow, cpu=SelectionCost(1e-5, 0.0), pcie=1e12)
    schedule = build_schedule("espresso", Job(load("vgg-19"), Cluster(8, 1, LINKS["10gbit"], device=quick), 0.01))
    assert any(schedule.host_select)


def test_groups_over_an_exchange_in_phases_are_the_best_ones() -> None:
    # selection after the exchange inside a node does not delay backward: the plan must not think so either
    device = replace(PUBLISHED["threshold"], selection=SelectionCost(0.0, 1e-8))
    job = Job(load("bert-base"), Cluster(32, 1, LINKS["25gbit"], device=device), 0.01, dense_below=512)
    per_byte = 1e-8 * job.numels.sum() / job.sparse_bytes.sum() + job.decode_cost.per_byte
    cost = line(lambda nbytes: job.cluster.allgather(nbytes).seconds + per_byte * nbytes)
    ready = job.group_costs(sparse=False, dense=True).ready
    costs = replace(job.group_costs(), ready=ready, sparse=(cost.fixed, cost.per_byte))
    best = predict_finish(plan_optimal(costs), costs) + sum(tensor.forward for tensor in job.trace.tensors)
    # the share of elements that are sent differs a little between groups
    assert run("safusion[collective=hierarchical]", job).seconds == pytest.approx(best, rel=2e-3)


def test_ssfusion_keeps_its_budget_and_its_lanes() -> None:
    # one call per tensor, and cheap messages: dense small tensors pay
    job = Job(load("bert-base"), Cluster(8, 1, LINKS["200gbit-rdma"]), 0.05, segmented=False)
    one, two = build_schedule("ssfusion-naive", job), build_schedule("ssfusion-i", job)
    assert len(two.messages) > len(one.messages)
    assert run("ssfusion-i", job).nbytes < run("ssfusion-naive", job).nbytes
    assert run("ssfusion-naive", job).nbytes <= 1.01 * 7 * 6 * 0.05 * job.numels.sum()


def test_ssfusion_offloads_only_where_the_host_is_quick_enough() -> None:
    def host(seconds: float) -> float:
        device = replace(PUBLISHED["threshold"], cpu=SelectionCost(seconds, seconds * 1e-6))
        job = Job(load("bert-base"), Cluster(8, 1, LINKS["10gbit"], device=device), 0.05)
        schedule = build_schedule("ssfusion-o", job)
        return sum(seconds > 0 for seconds in schedule.host_select)

    assert host(1e-5) > 20
    assert host(10.0) == 0


def test_selection_in_one_call_saves_launches() -> None:
    job = Job(load("bert-large"), Cluster(8, device=PUBLISHED["threshold"]), 0.01)
    apart = replace(job, segmented=False)
    assert run("saf-inter", apart).select - run("saf-inter", job).select == pytest.approx((393 - 50) * 25e-6)


@pytest.mark.parametrize(("trace", "sizes"), [("resnet-152", (2, 8, 16)), ("gpt2-large", (2, 8, 32))])
def test_alignment_pays_more_with_more_workers(trace: str, sizes: tuple[int, ...]) -> None:
    """The papers' ablation under jitter: naive, aligned, and aligned with sizes by measured times.

    The gain falls again where the exchange takes longer than everything else: for ResNet-152 above 16 workers.
    """
    gains = []
    for workers in sizes:
        cluster = Cluster(workers, 1, LINKS["10gbit"], device=PUBLISHED["threshold"], jitter=0.1)
        job = Job(load(trace), cluster, 0.01, 8, segmented=False)
        naive, inter, adaptive = (run(name, job, 6) for name in ("saf-naive", "saf-inter", "safusion"))
        assert adaptive.seconds < inter.seconds * 1.005
        assert inter.seconds < naive.seconds * 1.005
        assert inter.nbytes <= naive.nbytes  # the last buffers of the naive system are padded
        gains.append(naive.seconds / inter.seconds - 1)
    assert gains == sorted(gains)
    # the papers claim 12 to 31 % for naive to inter, as the largest over cluster sizes
    assert 0.05 < gains[-1] < 0.2


@pytest.mark.parametrize(("field", "value"), [("density", 0.0), ("density", 1.5), ("entry_bytes", 0.0)])
def test_jobs_refuse_senseless_numbers(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        replace(lstm(), **{field: value})


@pytest.mark.parametrize("nodes", [2, 3, 8, 15, 16, 64])
def test_shards_receive_as_much_from_many_workers_as_from_few(nodes: int) -> None:
    job = Job(load("bert-base"), Cluster(nodes, 1, LINKS["10gbit"]), 0.05)
    sharded, default = run("saf-pooled[collective=sharded]", job), run("saf-pooled", job)
    message = 10.5 / 8 * job.entries.sum()
    # half a message to the owners, and seven halves back
    assert sharded.nbytes == pytest.approx(4 * message * (nodes - 1) / nodes, rel=0.05)
    if nodes < 6:
        assert default.nbytes == pytest.approx((nodes - 1) * message, rel=0.05)
    else:
        assert default == sharded


@pytest.mark.parametrize("nodes", [4, 8])
def test_the_default_is_not_behind_ddp_on_slow_networks(nodes: int) -> None:
    for link, ahead in (("25gbit", True), ("100gbit-roce", True), ("200gbit-rdma", False)):
        job = Job(load("bert-large"), Cluster(nodes, 8, LINKS[link]), 0.05)
        assert (run("saf-pooled", job).seconds <= run("ddp-bf16", job).seconds) == ahead


@pytest.mark.parametrize("nodes", [2, 4, 8, 32])
def test_a_node_receives_as_much_from_many_nodes_as_from_few(nodes: int) -> None:
    job = Job(load("bert-base"), Cluster(nodes, 8, LINKS["10gbit"]), 0.05)
    message = 10.5 / 8 * job.entries.sum()
    share = message * (nodes - 1) / nodes
    assert run("saf-pooled[collective=hierarchical-sharded]", job).node_bytes == pytest.approx(4 * share, rel=0.05)
    # half a quota from each worker of all other nodes, where they are not added up first
    assert run("saf-pooled[collective=sharded]", job).node_bytes == pytest.approx((8 / 2 + 7 / 2) * share, rel=0.05)
    assert not is_counted("saf-pooled[collective=hierarchical-sharded]")
