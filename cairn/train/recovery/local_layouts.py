"""Which layouts a recipe can run in, and whether its ranks divide over the nodes that recovery asks for."""

import socket

import msgspec

from cairn.core.errors import ConfigError
from cairn.train.config import Train
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.templates import Fits, fitting


def layouts_that_fit(config: Train) -> Fits:
    from cairn.train.describe import spec_of
    from cairn.train.run_checks import check_layout

    spec = spec_of(config.model)

    def check(layout: Layout) -> None:
        other = msgspec.structs.replace(config, parallel=layout)
        check_layout(other, spec, layout.world())

    return fitting(check)


def check_nodes(config: Train) -> None:
    """Refuses what cannot start."""
    world, settings = config.parallel.world(), config.recovery
    if settings.nodes > world:
        raise ConfigError(
            f"recovery.nodes {settings.nodes} for {world} ranks",
            hint=f"each node has at least one rank: at most {world}",
        )
    if world % settings.nodes:
        raise ConfigError(
            f"{world} ranks do not divide over recovery.nodes {settings.nodes}",
            hint="every node has as many ranks as the others",
        )
    if settings.metrics_port:
        try:
            socket.create_server(("127.0.0.1", settings.metrics_port)).close()
        except OSError as error:
            raise ConfigError(
                f"recovery.metrics_port {settings.metrics_port} cannot be used: {error.strerror}",
                hint="choose another one, or 0 for none",
            ) from None
