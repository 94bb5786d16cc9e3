"""Whole experts on every rank, instead of a slice of each: expert parallelism for serving.

    router, every rank alike -> visits to experts that are here -> their products -> weighed sum -reduce-> over ranks

Every rank has all tokens, as tensor-parallel attention leaves them, so nothing is sent but the sum that tensor
parallelism sends anyway; a product of few whole experts reads longer rows than one of many slices. `expert_placement`
says who holds what; an expert with copies shares its tokens among them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild, Slot
from cairn.models.expert_placement import ExpertPlacement, evenly
from cairn.models.experts import ExpertLayer, Router, SharedExpert, combined
from cairn.models.grouped_product import sort_by_expert
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import Experts, ModelSpec


def spreads_experts(shards: Shards) -> bool:
    """Return whether experts are distributed over ranks (expert parallel) instead of sliced (tensor parallel)."""
    return shards.size > 1 and getattr(shards, "whole_experts", False)


class RankExperts(ExpertLayer):
    def __init__(
        self,
        build: ModelBuild,
        spec: ModelSpec,
        experts: Experts,
        placement: ExpertPlacement | None = None,
    ) -> None:
        if experts.biases:
            raise ConfigError(
                f"the experts of a {spec.family} model have biases, and are not spread over ranks",
                hint="leave out enable_expert_parallel",
            )
        super().__init__(build._replace(device="meta", shards=ALONE), spec, experts)
        self.shards = build.shards
        self.placement = placement or evenly(experts.count, build.shards.size)
        self.here = self.placement.ranks[build.shards.rank]
        self.router = Router(build, spec, experts)
        self.inner_EFD = build.parameter(len(self.here), len(self.parts) * self.width, spec.hidden)
        self.down_EDF = build.parameter(len(self.here), spec.hidden, self.width)
        shared = experts.shared_intermediate
        self.shared = SharedExpert(build, spec, experts) if shared else None
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, x_TD: Tensor) -> Tensor:
        entered_TD = self.shards.enter(x_TD)
        weights_TN, chosen_TN = self.router(entered_TD)
        weights_TN, slots_TN = self.visits_here(weights_TN, chosen_TN)
        elsewhere = len(self.here)
        order_M, ends_E = sort_by_expert(torch.where(slots_TN < 0, elsewhere, slots_TN), elsewhere)
        found_MD = self.visit(entered_TD[order_M // slots_TN.shape[1]], ends_E)
        out_MD = found_MD.new_zeros(len(order_M), self.hidden)
        out_MD[: len(found_MD)] = found_MD
        elsewhere_M = torch.arange(len(order_M), device=x_TD.device) >= ends_E[-1]
        out_MD = out_MD.masked_fill(elsewhere_M[:, None], 0.0)
        y_TD = self.shards.reduce(combined(out_MD, order_M, weights_TN))
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def visits_here(self, weights_TN: Tensor, chosen_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and slots of this rank; 0 and -1 for what another rank or none treats."""
        slot_EC, copies_E = self._table(chosen_TN.device)
        token_T1 = torch.arange(len(chosen_TN), device=chosen_TN.device)[:, None]
        known_TN = chosen_TN.clamp(min=0).long()
        slots_TN = slot_EC[known_TN, token_T1 % copies_E[known_TN]]
        slots_TN = torch.where(chosen_TN < 0, -1, slots_TN).to(chosen_TN.dtype)
        return weights_TN.masked_fill(slots_TN < 0, 0.0), slots_TN

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The slot of each copy of each expert, where it is here; and how many copies there are."""
        if device not in self._tables:
            copies = [self.placement.copies(e) for e in range(self.experts.count)]
            slot_EC = torch.full((len(copies), max(map(len, copies))), -1)
            for expert, places in enumerate(copies):
                for copy, (rank, slot) in enumerate(places):
                    slot_EC[expert, copy] = slot if rank == self.shards.rank else -1
            counts_E = torch.tensor([len(places) for places in copies])
            self._tables[device] = slot_EC.to(device), counts_E.to(device)
        return self._tables[device]

    def slots(self) -> Iterator[Slot]:
        """Slots of this rank's experts, named by their global index."""
        by_expert = self._by_expert()
        for place, expert in enumerate(self.here):
            for slot in by_expert[expert]:
                yield slot._replace(index=(place, *slot.index[1:]))

    def slots_elsewhere(self) -> Iterator[Slot]:
        """Slots of experts on other ranks, which a checkpoint also contains."""
        for expert, slots in self._by_expert().items():
            if expert not in self.here:
                yield from slots

    def _by_expert(self) -> dict[int, list[Slot]]:
        slots: dict[int, list[Slot]] = {}
        for slot in self.whole_slots():
            slots.setdefault(int(slot.name.partition(".")[0]), []).append(slot)
        return slots
