"""Errors of a group: each names the operation, the rank and the reason.

CommError
├── RankMismatch   ranks do not agree on what they do together: operation, size, type, order
├── RankLost       a rank died, left, or never came
├── CommTimeout    nothing moved for longer than the group's timeout
└── GroupStopped   another rank met one of the above and stopped the group
"""

from cairn.core.errors import CairnError


class CommError(CairnError):
    """A collective that could not be done. The group is stopped; its ranks have to start anew."""


class RankMismatch(CommError):
    pass


class RankLost(CommError):
    pass


class CommTimeout(CommError):
    pass


class GroupStopped(CommError):
    pass
