"""Sound as an encoder of speech reads it: the log-mel spectrogram of windows of 30 seconds.

    samples [480000] at 16 kHz -STFT, hop 160-> power [201, 3000] -triangles on the mel scale-> log10 -> [bins, 3000]

The triangles are Slaney's: linear below 1 kHz, logarithmic above, each with an area of one.
"""

import functools
import math

import torch
from torch import Tensor

RATE = 16_000  # samples per second
WINDOW_S = 30
SAMPLES = RATE * WINDOW_S
FFT, HOP = 400, 160
FRAMES = SAMPLES // HOP
LINEAR_HZ = 200 / 3  # of a mel, below
BREAK_HZ = 1000.0
LOG_STEP = math.log(6.4) / 27  # of a mel, above


def log_mel(samples_BS: Tensor, bins: int) -> Tensor:
    """[B, bins, 3000] of windows that are shorter than 30 s or as long; silence fills the rest."""
    padded_BS = torch.nn.functional.pad(samples_BS, (0, SAMPLES - samples_BS.shape[-1]))
    window = torch.hann_window(FFT, device=padded_BS.device)
    transformed = torch.stft(padded_BS, FFT, HOP, window=window, return_complex=True)
    power_BFN = transformed[..., :-1].abs().square()
    mel_BMN = mel_filters(bins).to(power_BFN.device) @ power_BFN
    logs_BMN = mel_BMN.clamp(min=1e-10).log10()
    floor_B11 = logs_BMN.amax((-2, -1), keepdim=True) - 8.0
    return (torch.maximum(logs_BMN, floor_B11) + 4.0) / 4.0


@functools.cache
def mel_filters(bins: int) -> Tensor:
    """[bins, FFT / 2 + 1]."""
    top = _mel_of(RATE / 2)
    edges_E = torch.tensor([_hertz_of(top * at / (bins + 1)) for at in range(bins + 2)])
    hertz_F = torch.arange(FFT // 2 + 1) * (RATE / FFT)
    distance_EF = edges_E[:, None].double() - hertz_F
    widths_E = edges_E.double().diff()
    rising_MF = -distance_EF[:-2] / widths_E[:-1, None]
    falling_MF = distance_EF[2:] / widths_E[1:, None]
    triangles_MF = torch.minimum(rising_MF, falling_MF).clamp(min=0)
    areas_M = 2.0 / (edges_E[2:] - edges_E[:-2]).double()
    return (triangles_MF * areas_M[:, None]).float()


def _mel_of(hertz: float) -> float:
    if hertz < BREAK_HZ:
        return hertz / LINEAR_HZ
    return BREAK_HZ / LINEAR_HZ + math.log(hertz / BREAK_HZ) / LOG_STEP


def _hertz_of(mel: float) -> float:
    first = BREAK_HZ / LINEAR_HZ
    return mel * LINEAR_HZ if mel < first else BREAK_HZ * math.exp(LOG_STEP * (mel - first))
