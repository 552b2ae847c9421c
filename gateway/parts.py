"""The parts of the gateway, built bottom up: each is given those below it, and none is changed afterwards."""

from collections.abc import Callable

from gateway.access.api_keys import KeyRing
from gateway.access.owners import Owners
from gateway.checkpoints.checkpoint_registry import Checkpoints
from gateway.checkpoints.checkpoint_storage import Storage
from gateway.checkpoints.exports import Exports
from gateway.database.database import Database
from gateway.discovery import choose
from gateway.fair_queue import FairQueue
from gateway.futures.future import Kind
from gateway.futures.futures import Futures
from gateway.health import Health
from gateway.quotas import Quota
from gateway.replicas.renderers import Renderers
from gateway.replicas.samplers import Samplers
from gateway.replicas.snapshot_pushes import Snapshots, Versions
from gateway.replicas.trainer_link import TrainerLink
from gateway.sampling.sample_runner import SampleRunner
from gateway.sampling.sampling_sessions import Sampling
from gateway.sessions.sessions import Sessions
from gateway.settings import GatewaySettings
from gateway.training.batches import Batches
from gateway.training.commands import Command, CommandRunner, StepCommands
from gateway.training.copies import Copies
from gateway.training.custom_losses import CustomLosses
from gateway.training.models import Models
from gateway.training.orphans import OrphanCollector
from gateway.training.training import Training
from gateway.training.training_runs import TrainingRuns
from gateway.training.weight_commands import CreationCommands, SaveCommands


class Parts:
    """All parts of one gateway. Nothing runs before they are opened and started.

    Args:
        on_superseded: Called once another gateway has taken over the state.
    """

    def __init__(self, settings: GatewaySettings, on_superseded: Callable[[], None]) -> None:
        self.request_memory = Quota(
            "max_request_memory_bytes", settings.max_request_memory_bytes, "bytes of requests in progress"
        )
        max_pending = Quota("max_pending", settings.max_pending, "unfinished requests")
        max_sessions = Quota("max_sessions", settings.max_sessions, "open sessions")
        self.database = Database(settings.store_url, on_superseded)
        self.keys = KeyRing(self.database, settings.given_keys, settings.host)
        self.owners = Owners(self.database)
        self._build_replicas(settings)

        self.futures = Futures(self.database, settings.result_ttl_s, max_pending, self.owners)
        self.sessions = Sessions(self.database, settings.session_ttl_s, max_sessions)
        self.storage = Storage(settings.checkpoint_root)
        self.checkpoints = Checkpoints(self.database, self.storage, self.owners)
        self.exports = Exports(self.database, self.checkpoints)
        self.health = Health(
            settings.model_name, self.futures, self.renderers, self.samplers, self.trainer, self.versions,
            settings.state_dir,
        )  # fmt: skip

        sample_runner = SampleRunner(
            self.renderers, self.samplers, self.snapshots, self.versions, settings.retry_deadline_s,
            settings.sample_timeout_s,
        )  # fmt: skip
        self.sampling = Sampling(
            self.database, self.futures, self.sessions, self.checkpoints, self.samplers, self.snapshots, sample_runner,
            settings.model_name,
        )  # fmt: skip
        self._build_training(settings)

    def _build_replicas(self, settings: GatewaySettings) -> None:
        kind, namespace = settings.discovery, settings.kubernetes_namespace
        renderers = choose(kind, "renderer", settings.renderer, namespace)
        samplers = choose(kind, "sampler", settings.sampler, namespace)
        self.trainer = TrainerLink(settings.trainer, settings.trainer_wait_s)
        weight_of = self.owners.weight
        self.renderers = Renderers(
            renderers, settings.renderer_concurrency, settings.retry_deadline_s, self.trainer, weight_of
        )
        self.snapshots = Snapshots(self.database, self.trainer, settings.push_timeout_s)
        self.samplers = Samplers(samplers, settings.sampler_concurrency, self.snapshots, self.trainer, weight_of)
        self.versions = Versions()

    def _build_training(self, settings: GatewaySettings) -> None:
        self.models = Models(self.database, settings.max_models_per_owner, self.owners)
        self.custom_losses = CustomLosses(self.database, self.futures, self.sessions)
        batches = Batches(self.futures, self.renderers, self.custom_losses)
        timeout_s, patience_s = settings.command_timeout_s, settings.retry_deadline_s
        creating = CreationCommands(
            self.models, self.checkpoints, self.sessions, self.trainer, self.samplers, timeout_s, patience_s
        )
        stepping = StepCommands(batches, self.trainer, FairQueue(settings.trainer_concurrency, self.owners.weight))
        saving = SaveCommands(self.checkpoints, self.sampling, self.trainer, timeout_s)
        commands: dict[Kind, Command] = {
            Kind.CREATE_MODEL: creating.create_model,
            Kind.LOAD_STATE: creating.load_state,
            Kind.FORWARD: stepping.forward_backward,
            Kind.FORWARD_BACKWARD: stepping.forward_backward,
            Kind.OPTIM_STEP: stepping.optim_step,
            Kind.SAVE_STATE: saving.save_state,
            Kind.SAVE_FOR_SAMPLER: saving.save_for_sampler,
            Kind.SAVE_EXTERNAL: saving.save_external,
        }
        runner = CommandRunner(self.futures, self.models, self.trainer, batches, commands, patience_s)
        self.training = Training(
            self.futures, self.sessions, self.models, batches, runner, self.trainer, settings.gap_timeout_s
        )
        self.training_runs = TrainingRuns(self.database, self.checkpoints)
        self.copies = Copies(self.database, self.sessions, self.checkpoints)
        self.orphans = OrphanCollector(self.database, self.trainer, self.samplers, self.snapshots, self.checkpoints)
