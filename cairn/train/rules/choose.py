"""Loss rule of a recipe's [objective]."""

from cairn.train.config import Objective
from cairn.train.rules.dpo import DPO
from cairn.train.rules.ipo import IPO
from cairn.train.rules.kto import KTO
from cairn.train.rules.orpo import ORPO
from cairn.train.rules.pairs import PairRule
from cairn.train.rules.reward import Reward
from cairn.train.rules.simpo import SimPO

BETA, SIMPO_BETA = 0.1, 2.0


def rule_of(objective: Objective) -> PairRule | KTO:
    beta = objective.beta or BETA
    match objective.kind:
        case "dpo":
            return DPO(beta, objective.label_smoothing)
        case "ipo":
            return IPO(beta)
        case "kto":
            return KTO(beta, objective.desirable, objective.undesirable)
        case "orpo":
            return ORPO(objective.weight)
        case "reward":
            return Reward(objective.center)
        case "simpo":
            return SimPO(objective.beta or SIMPO_BETA, objective.gamma)
    raise ValueError(f"{objective.kind} is no objective of preferences")
