"""Errors of transfers between two machines.

TransferError
├── Refused      the two sides do not hold the same thing: both descriptions are in the message
├── PeerLost     the other side is gone, or has said nothing for too long
└── LeaseLost    the pages may have been given to another request: what was read is not to be used
"""

from cairn.core.errors import CairnError


class TransferError(CairnError):
    """A transfer that cannot be planned, or that did not happen."""


class TransferRefused(TransferError):
    pass


class PeerLost(TransferError):
    pass


class LeaseLost(TransferError):
    pass
