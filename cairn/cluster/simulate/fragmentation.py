"""Fragmentation of free GPU capacity, and placement by fragmentation gradient descent (FGD).

Of the free GPUs of a node, a pod that asks for (cpu, n GPUs, m/1000 of each) can use those with m free, if there are
n of them and enough CPU; the rest is a fragment. The fragmentation of a node is what is left over on average, when the
next pod is drawn from the workload (Weng and others, "Beware of Fragmentation", ATC 2023):

    F(node) = free GPU - sum over kinds of pods:  share of the kind * GPU of this node that it could use

FGD places each pod where F rises least. Works on many nodes at once, with arrays; knows no queue and no clock.
"""

from collections import Counter

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.cluster.simulate.openb import MILLI, Pods

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POPULAR = 0.95  # the most frequent kinds of pods that make up this share stand for the workload


class Kinds(msgspec.Struct, frozen=True):
    """The typical pods of a workload, grouped by what they ask of GPUs; CPU is a distribution within a group."""

    milli_K: Ints  # of each GPU
    count_K: Ints  # GPUs
    cpu_cuts: Ints  # CPU requests, ascending
    share_CK: Floats  # share of all pods in group K that ask for at most cpu_cuts[C - 1]


def typical_kinds(pods: Pods, popular: float = POPULAR) -> Kinds:
    """Pods without GPUs count in the shares too: to them every free GPU is a fragment."""
    kinds = Counter(zip(pods.cpu.tolist(), pods.milli.tolist(), pods.count.tolist(), strict=True))
    chosen, together = [], 0
    for kind, times in sorted(kinds.items(), key=lambda item: (item[1], item[0]), reverse=True):
        if together >= popular * len(pods):
            break
        chosen.append((kind, times))
        together += times
    with_gpu = [(kind, times / together) for kind, times in chosen if kind[2] > 0]
    groups = sorted({(milli, count) for (_, milli, count), _ in with_gpu})
    cuts = sorted({cpu for (cpu, _, _), _ in with_gpu})
    share_CK = np.zeros((len(cuts) + 1, len(groups)))
    for (cpu, milli, count), share in with_gpu:
        share_CK[cuts.index(cpu) + 1 :, groups.index((milli, count))] += share
    table = np.array(groups, dtype=np.int64).reshape(-1, 2)
    return Kinds(table[:, 0], table[:, 1], np.array(cuts, dtype=np.int64), share_CK)


def fragmentation(kinds: Kinds, cpu_N: Ints, gpu_NG: Ints) -> Floats:
    """F of each node, in thousandths of a GPU. Work: nodes * groups * GPUs."""
    enough_NKG = gpu_NG[:, None, :] >= kinds.milli_K[None, :, None]
    usable_NK = (gpu_NG[:, None, :] * enough_NKG).sum(2)
    usable_NK = usable_NK * (enough_NKG.sum(2) >= kinds.count_K[None, :])
    share_NK = kinds.share_CK[np.searchsorted(kinds.cpu_cuts, cpu_N, side="right")]
    return gpu_NG.sum(1) - (share_NK * usable_NK).sum(1)


class FgdScores:
    """The score of every node for every kind of pod, computed again only for nodes that have changed since."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._memo: dict[tuple[int, int, int], tuple[Ints, Ints, Ints]] = {}

    def __call__(
        self,
        pod: tuple[int, int, int],
        nodes: Ints,
        cpu_N: Ints,
        gpu_NG: Ints,
        version_N: Ints,
    ) -> tuple[Ints, Ints]:
        """Scores 0..100 of these nodes for a pod (cpu, milli, count), and the GPU a shared one goes to."""
        if pod not in self._memo:
            size = len(cpu_N)
            self._memo[pod] = (np.zeros(size, int), np.zeros(size, int), np.full(size, -1))
        score_N, gpu_N, seen_N = self._memo[pod]
        stale = nodes[seen_N[nodes] != version_N[nodes]]
        if len(stale):
            score_N[stale], gpu_N[stale] = self._score(pod, cpu_N[stale], gpu_NG[stale])
            seen_N[stale] = version_N[stale]
        return score_N[nodes], gpu_N[nodes]

    def _score(self, pod: tuple[int, int, int], cpu_N: Ints, gpu_NG: Ints) -> tuple[Ints, Ints]:
        cpu, milli, count = pod
        before_N = fragmentation(self._kinds, cpu_N, gpu_NG)
        best_N, gpu_N = np.full(len(cpu_N), -1), np.zeros(len(cpu_N), int)
        if milli == 0 or milli == MILLI:
            after_NG = gpu_NG.copy()
            free_NG = after_NG == MILLI
            after_NG[free_NG & (np.cumsum(free_NG, axis=1) <= count)] = 0
            return self._grade(before_N, cpu_N - cpu, after_NG), gpu_N
        for gpu in range(gpu_NG.shape[1]):
            can = np.flatnonzero(gpu_NG[:, gpu] >= milli)
            if not len(can):
                continue
            after_NG = gpu_NG[can].copy()
            after_NG[:, gpu] -= milli
            score = self._grade(before_N[can], cpu_N[can] - cpu, after_NG)
            better = can[score > best_N[can]]
            best_N[better] = score[score > best_N[can]]
            gpu_N[better] = gpu
        return best_N, gpu_N

    def _grade(self, before_N: Floats, cpu_N: Ints, after_NG: Ints) -> Ints:
        """The less F rises the better: a logistic curve to whole numbers 0..100, as kube-scheduler wants scores."""
        rise_N = fragmentation(self._kinds, cpu_N, after_NG) - before_N
        return (100 / (1 + np.exp(rise_N / MILLI))).astype(int)
