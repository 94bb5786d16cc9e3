"""Rounding that looks at the inputs."""

import torch


def gptq(weight_ND: torch.Tensor, inputs_DM: torch.Tensor, step: float) -> torch.Tensor:
    """Weights that are multiples of `step`, chosen so that weight @ inputs changes least."""
    # begin answer
    columns = weight_ND.shape[1]
    hessian_DD = inputs_DM @ inputs_DM.T
    hessian_DD += 0.01 * hessian_DD.diagonal().mean() * torch.eye(columns, dtype=hessian_DD.dtype)
    factor_DD = torch.linalg.cholesky(torch.linalg.inv(hessian_DD), upper=True)
    left_ND, rounded_ND = weight_ND.clone(), torch.empty_like(weight_ND)
    for j in range(columns):
        rounded_ND[:, j] = (left_ND[:, j] / step).round() * step
        error_N = (left_ND[:, j] - rounded_ND[:, j]) / factor_DD[j, j]
        left_ND[:, j + 1 :] -= torch.outer(error_N, factor_DD[j, j + 1 :])
    return rounded_ND
    # end answer
