"""`python -m fovea_gateway --model-name NAME --model DIR --renderer H:P --sampler H:P --trainer H:P`."""

import asyncio
import resource

from fovea.runtime.processes import configure_logging
from fovea.wire.errors import FoveaError
from fovea_gateway.fronts.app import Gateway
from fovea_gateway.settings import GatewaySettings


async def _run(settings: GatewaySettings) -> None:
    await Gateway(settings).run()


def main() -> None:
    """Runs the gateway until SIGTERM or SIGINT."""
    # Every unfinished future of every client is an open connection, so raise the soft limit on open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = GatewaySettings.from_command_line("python -m fovea_gateway")
    configure_logging("gateway", settings.log_level)
    try:
        asyncio.run(_run(settings))
    except (FoveaError, OSError) as error:
        raise SystemExit(f"gateway: {error}") from None


if __name__ == "__main__":
    main()
