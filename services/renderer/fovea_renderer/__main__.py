"""Entry point of the renderer: `python -m fovea_renderer --model DIR`."""

import asyncio

from fovea.runtime.processes import configure_logging
from fovea.wire.errors import FoveaError
from fovea_renderer.renderer_service import serve
from fovea_renderer.settings import RendererSettings


def main() -> None:
    """Reads the settings and serves; exits with a one-line reason if the model cannot be served."""
    settings = RendererSettings.from_command_line("renderer")
    configure_logging("renderer", settings.log_level)
    try:
        asyncio.run(serve(settings))
    except (ValueError, FoveaError) as error:
        raise SystemExit(f"renderer: {error}") from error


if __name__ == "__main__":
    main()
