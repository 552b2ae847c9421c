"""The parts of the gateway, built bottom up: each is given those below it, and none is changed afterwards."""

from collections.abc import Callable

from fovea.runtime.cautious_clock import CautiousClock
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
from gateway.training.commands import Command, CommandRunner
from gateway.training.copies import Copies
from gateway.training.custom_losses import CustomLosses
from gateway.training.journal import Journal
from gateway.training.models import Models
from gateway.training.orphans import OrphanCollector
from gateway.training.parking import Parking
from gateway.training.replay import Replay
from gateway.training.residence import Residence
from gateway.training.step_commands import StepCommands
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
        self.trainer = TrainerLink(settings.trainer, settings.trainer_wait_s)
        renderers = choose(settings.discovery, "renderer", settings.renderer, settings.kubernetes_namespace)
        self.renderers = Renderers(
            renderers, settings.renderer_concurrency, settings.retry_deadline_s, self.trainer, self.owners.weight
        )

        self._clock = clock = CautiousClock()
        self.futures = Futures(self.database, settings.result_ttl_s, max_pending, self.owners, clock)
        self.sessions = Sessions(self.database, settings.session_ttl_s, max_sessions)
        self.storage = Storage(settings.checkpoint_root)
        self.checkpoints = Checkpoints(self.database, self.storage, self.owners, clock)
        self.exports = Exports(self.database, self.checkpoints)
        self._build_models(settings)
        self._build_samplers(settings)
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

    def _build_models(self, settings: GatewaySettings) -> None:
        self.models = Models(self.database, settings.max_models_per_owner, self.owners)
        self.custom_losses = CustomLosses(self.database, self.futures, self.sessions)
        self.batches = Batches(self.futures, self.renderers, self.custom_losses)
        self.steps = StepCommands(
            self.futures,
            self.batches,
            self.trainer,
            FairQueue(1, self.owners.weight, settings.trainer_concurrency),
        )
        self.journal = Journal(self.database, self.models, self.trainer, settings.max_journal_bytes)
        replay = Replay(
            self.journal, self.steps, self.checkpoints, self.database, self.trainer, settings.command_timeout_s
        )
        self.residence = Residence(self.models, self.journal, replay, self.trainer, settings.retry_deadline_s)

    def _build_samplers(self, settings: GatewaySettings) -> None:
        samplers = choose(settings.discovery, "sampler", settings.sampler, settings.kubernetes_namespace)
        self.snapshots = Snapshots(self.database, self.trainer, self.residence, settings.push_timeout_s)
        self.samplers = Samplers(
            samplers, settings.sampler_concurrency, self.snapshots, self.trainer, self.owners.weight
        )
        self.versions = Versions()

    def _build_training(self, settings: GatewaySettings) -> None:
        timeout_s, patience_s = settings.command_timeout_s, settings.retry_deadline_s
        creating = CreationCommands(
            self.models, self.checkpoints, self.sessions, self.trainer, self.samplers, timeout_s, patience_s
        )
        saving = SaveCommands(self.checkpoints, self.sampling, self.trainer, timeout_s)
        commands: dict[Kind, Command] = {
            Kind.CREATE_MODEL: creating.create_model,
            Kind.LOAD_STATE: creating.load_state,
            Kind.FORWARD: self.steps.forward_backward,
            Kind.FORWARD_BACKWARD: self.steps.forward_backward,
            Kind.OPTIM_STEP: self.steps.optim_step,
            Kind.SAVE_STATE: saving.save_state,
            Kind.SAVE_FOR_SAMPLER: saving.save_for_sampler,
            Kind.SAVE_EXTERNAL: saving.save_external,
        }
        runner = CommandRunner(self.futures, self.models, self.residence, self.journal, self.batches, commands)
        self.training = Training(
            self.futures, self.sessions, self.models, self.batches, runner, self.residence, self.journal, self.trainer,
            settings.gap_timeout_s,
        )  # fmt: skip
        self.parking = Parking(
            self.futures, self.sessions, self.models, self.training, self.residence, self.trainer,
            settings.parked_ttl_s, settings.parked_bytes, self._clock,
        )  # fmt: skip
        self.training_runs = TrainingRuns(self.database, self.checkpoints)
        self.copies = Copies(self.database, self.sessions, self.checkpoints)
        self.orphans = OrphanCollector(self.database, self.trainer, self.samplers, self.snapshots, self.checkpoints)
