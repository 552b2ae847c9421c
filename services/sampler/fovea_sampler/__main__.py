"""Entry point of the sampler: `python -m fovea_sampler --model DIR --port N --renderer HOST:PORT`."""

import asyncio
import logging
import time


def main() -> None:
    """Starts the engine, runs the service until it ends, and exits the process with the exit code of the service."""
    started = time.monotonic()
    from fovea_sampler.settings import SamplerSettings

    settings = SamplerSettings.from_command_line("fovea_sampler")
    from fovea.runtime.processes import RECENT, UNUSED, configure_logging, importing, leave, wait_for_turn

    configure_logging("sampler", settings.log_level)
    # The order matters. The environment must be set before torch is imported, and the engine must be launched (it
    # forks) before gRPC starts threads.
    from fovea_sampler.engine import engine_arguments, vllm_launch

    vllm_launch.prepare_environment(settings)
    try:
        vllm_launch.check_model(settings.model)
        vllm_launch.context(settings)
        with importing(*UNUSED):
            capacity = vllm_launch.measure_adapter_capacity(settings)
            config = vllm_launch.engine_config(settings, capacity)
    except (OSError, ValueError) as error:
        raise SystemExit(f"fovea_sampler: {error}") from None
    logger = logging.getLogger(__name__)
    wait_for_turn(logger, "the other service on this device is ready")
    logger.info("vLLM %s", engine_arguments.start_steps(config))
    begun = time.monotonic()
    llm = vllm_launch.launch(config)
    logging.getLogger("vllm").addHandler(RECENT)  # vLLM's import gives its logger handlers of its own
    logger.info("vLLM has started after %.1f s", time.monotonic() - begun)
    try:
        from fovea_sampler.engine.manifest_check import checkpoint_directory
        from fovea_sampler.engine.vllm_engine import Engine
        from fovea_sampler.sampler_app import serve

        engine = Engine(llm, settings, checkpoint_directory(settings.model))
        status = asyncio.run(serve(settings, engine, capacity, started))
    finally:
        llm.shutdown()
    leave(status)


if __name__ == "__main__":
    main()
