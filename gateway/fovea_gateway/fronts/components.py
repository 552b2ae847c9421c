"""The components of the gateway, built bottom up: each receives those below it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fovea.runtime.durable import ExpiryClock
from fovea.wire.errors import InvalidInput, ServerPaths
from fovea_gateway.access.api_keys import KeyRing
from fovea_gateway.access.audit_log import AuditLog
from fovea_gateway.access.fair_queue import FairQueue
from fovea_gateway.access.kept_rows import KeptRows, ResultRoom
from fovea_gateway.access.oidc import OidcProvider
from fovea_gateway.access.owners import Owners, Quota
from fovea_gateway.access.sign_ins import LinkSigner, SignIns
from fovea_gateway.checkpoints.checkpoint import Storage
from fovea_gateway.checkpoints.checkpoint_registry import Checkpoints
from fovea_gateway.checkpoints.exports import Exports
from fovea_gateway.checkpoints.uploads import Uploads
from fovea_gateway.database.database import Database
from fovea_gateway.health import Health, Shares
from fovea_gateway.live.alerts import START_S, Alerts, Bounds, Webhook
from fovea_gateway.live.live_state import LiveState
from fovea_gateway.live.live_view import LiveView
from fovea_gateway.replicas.base_models import BaseModel, BaseModels, Trainers
from fovea_gateway.replicas.discovery import Discovery, KubernetesDiscovery, StaticDiscovery
from fovea_gateway.replicas.renderers import Renderers
from fovea_gateway.replicas.replicas import TrainerLink
from fovea_gateway.replicas.samplers import Samplers
from fovea_gateway.replicas.snapshot_pushes import Snapshots
from fovea_gateway.sampling.recordings import Recordings
from fovea_gateway.sampling.sample_runner import SampleRunner, Versions
from fovea_gateway.sampling.sampling_sessions import Sampling
from fovea_gateway.sessions.future import Activity, Kind
from fovea_gateway.sessions.futures import Futures
from fovea_gateway.sessions.sessions import Sessions
from fovea_gateway.settings import BaseModelSettings, GatewaySettings
from fovea_gateway.training.batches import Batches, CustomLosses
from fovea_gateway.training.commands import CommandRunner, StepCommands
from fovea_gateway.training.housekeeping import OrphanCollector, Suspension, UnnamedLimit
from fovea_gateway.training.journal import Journal
from fovea_gateway.training.models import Models
from fovea_gateway.training.residency import Residency, TrainerSide
from fovea_gateway.training.trainer_pool import TrainerPool
from fovea_gateway.training.trainer_queue import SAVE_SLOTS, TRAINER_SLOTS, Replay, Suspects, TrainerQueue
from fovea_gateway.training.training import Training
from fovea_gateway.training.training_runs import Copies, TrainingRuns
from fovea_gateway.training.weight_commands import CreationCommands, SaveCommands


@dataclass(frozen=True)
class TrainingParts:
    """The components that train one base model."""

    pool: TrainerPool
    batches: Batches


class Components:
    """All components of one gateway, built once. Nothing runs until they are opened and started.

    Args:
        on_superseded: Called once another gateway has taken over the state.

    Attributes:
        base_models: The served base models, each with its renderers, samplers and trainer.
        pools: For each base model with trainers, the homes of its models.
    """

    def __init__(self, settings: GatewaySettings, on_superseded: Callable[[], None]) -> None:
        self._build_state(settings, on_superseded)
        built = [self._build_base_model(own, settings) for own in settings.base_models]
        self.base_models = BaseModels([base for base, _ in built])
        trained = {base.name: parts for base, parts in built if parts is not None}
        self.pools = {name: parts.pool for name, parts in trained.items()}
        self._build_features(settings, trained)

    def _build_state(self, settings: GatewaySettings, on_superseded: Callable[[], None]) -> None:
        """Builds the components that do not depend on base models."""
        self.request_memory = Quota(
            "max_request_memory_bytes", settings.max_request_memory_bytes, "bytes of requests in progress"
        )
        max_pending = Quota("max_pending", settings.part_of(settings.max_pending), "unfinished requests")
        max_sessions = Quota("max_sessions", settings.part_of(settings.max_sessions), "open sessions")
        self.database = Database(settings.store_url, on_superseded, shard_count=settings.shards)
        self.keys = KeyRing(
            self.database, settings.given_keys, settings.host, settings.allowed_host,
            lambda token: self.sign_ins.key_id_of(token),
        )  # fmt: skip
        provider = OidcProvider(settings) if settings.oidc_issuer else None
        self.sign_ins = SignIns(self.database, self.keys, provider, settings.oidc_session_s)
        is_shared = settings.shards > 1
        self.shares = Shares(self.database.shards, lambda owner: self.owners.weight(owner))
        self.owners = Owners(self.database, settings.owner_limits, self.shares.spread if is_shared else None)
        self._weight_of = self.shares.weight if is_shared else self.owners.weight
        self._clock = clock = ExpiryClock()
        row_room = settings.row_room_bytes  # walks the state folder
        self.audit = AuditLog(self.database, row_room // 4, clock)
        self.paths = ServerPaths([settings.checkpoint_root, str(settings.state_dir.absolute())])
        result_room = ResultRoom(self.database, settings.part_of(settings.max_result_bytes))
        self.activity = Activity()
        self.kept_rows = KeptRows(
            self.database, row_room, settings.ended_ttl_s, clock,
            lambda model_id: self.checkpoints.forget_model(model_id),
        )  # fmt: skip
        self.sessions = Sessions(self.database, settings.session_ttl_s, max_sessions, self.kept_rows, settings.quiet_s)
        self.futures = Futures(
            self.database, settings.result_ttl_s, max_pending, self.owners, clock, result_room,
            self.activity.note_end, self.sessions.hear, self.paths.hide,
        )  # fmt: skip
        self.storage = Storage(settings.checkpoint_root)
        self.checkpoints = Checkpoints(self.database, self.storage, self.owners, clock, self.kept_rows)
        self.link_signer = LinkSigner(self.database, self.keys.is_valid)
        self.exports = Exports(self.database, self.checkpoints, self.link_signer)
        self.uploads = Uploads(
            self.database, self.checkpoints, self.link_signer, settings.max_upload_bytes,
            lambda name, uri, lora: self.base_models.check_adapter(name, uri, lora),
        )  # fmt: skip
        self.models = Models(self.database, settings.max_models_per_owner, self.owners, self.shares.models_elsewhere)
        self.recordings = Recordings(self.database, self.checkpoints, clock, row_room // 2)
        self.custom_losses = CustomLosses(self.database, self.futures, self.sessions)
        self.journal = Journal(self.database, self.models, settings.part_of(settings.max_journal_bytes))
        self._suspects = Suspects()

    def _build_features(self, settings: GatewaySettings, trained: Mapping[str, TrainingParts]) -> None:
        """Builds the components that use the base models."""
        self.versions = Versions()
        self.health = Health(
            self.futures, self.sessions, self.base_models, self.versions, settings.state_dir, self.shares
        )

        sample_runner = SampleRunner(self.versions, settings.retry_deadline_s, settings.sample_timeout_s)
        self.sampling = Sampling(
            self.database,
            self.futures,
            self.sessions,
            self.checkpoints,
            self.base_models,
            sample_runner,
            self.kept_rows,
            self.recordings,
        )
        runners = {name: self._build_runner(name, parts, settings) for name, parts in trained.items()}
        self.training = Training(
            self.futures, self.sessions, self.models, self.base_models, runners, self.pools, self.journal,
            self.kept_rows, settings.gap_timeout_s,
        )  # fmt: skip
        self.suspension = Suspension(
            self.futures, self.sessions, self.models, self.training, self.pools, self.base_models,
            settings.parked_ttl_s, settings.part_of(settings.parked_bytes), self.owners.weight, self._clock,
        )  # fmt: skip
        self.training_runs = TrainingRuns(self.database, self.checkpoints)
        self.copies = Copies(self.database, self.sessions, self.checkpoints)
        self.unnamed_limit = UnnamedLimit(
            self.database, self.base_models, settings.part_of(settings.unnamed_bytes), self.owners.weight
        )
        self.orphans = OrphanCollector(self.database, self.base_models, self.checkpoints, self.uploads)
        bounds = Bounds(
            settings.alerts_kl, settings.alerts_gone_s, settings.alerts_disk_share, settings.alerts_durable_lag_s,
            settings.alerts_slot_wait_s, min(settings.retry_deadline_s, START_S),
        )  # fmt: skip
        webhook = Webhook(settings.alerts_webhook)
        self.alerts = Alerts(self.models, self.base_models, bounds, settings.private_folders, webhook)
        self.live_state = LiveState(
            self.activity, self.database, self.models, self.sampling, self.base_models, self.alerts
        )  # fmt: skip
        self.live_view = LiveView(self.live_state, self.sessions, self.futures, self.base_models, self.database)

    def _build_base_model(
        self, own: BaseModelSettings, settings: GatewaySettings
    ) -> tuple[BaseModel, TrainingParts | None]:
        def found(service: str, addresses: list[str]) -> Discovery:
            in_kubernetes = settings.discovery == "kubernetes"
            return choose_discovery(service, addresses, in_kubernetes, settings.kubernetes_namespace)

        name, weight_of = own.model_name, self._weight_of
        trainers = Trainers(own.trainer, settings.trainer_wait_s)
        renderers = Renderers(
            found("renderer", own.renderer), settings.part_of(settings.renderer_concurrency), settings.retry_deadline_s,
            trainers.check_files if trainers else _check_nothing, weight_of,
        )  # fmt: skip
        pool = TrainerPool(self.models)
        batches = Batches(self.futures, renderers, self.custom_losses, self.recordings, pool.find_trainer)
        pool.sides += [self._build_side(name, link, pool, batches, settings) for link in trainers.links]
        snapshots = Snapshots(
            self.database, name, trainers.links, pool.find_trainer if trainers else None,
            pool.check_snapshots if trainers else None, settings.push_timeout_s,
        )  # fmt: skip
        samplers = Samplers(
            found("sampler", own.sampler), settings.sampler_concurrency,
            snapshots.put_resident, snapshots.catch_up, snapshots.is_lost,
            trainers.check_files if trainers else renderers.check_files, weight_of, settings.sampler_beside,
            self.shares.part,
        )  # fmt: skip
        is_sampled = bool(own.sampler)
        base = BaseModel(name, own.tokenizer_id, renderers, samplers, snapshots, trainers, is_sampled=is_sampled)
        return base, TrainingParts(pool, batches) if trainers else None

    def _build_side(
        self, name: str, link: TrainerLink, pool: TrainerPool, batches: Batches, settings: GatewaySettings
    ) -> TrainerSide:
        fair_queue = FairQueue(TRAINER_SLOTS, self._weight_of, TRAINER_SLOTS * settings.trainer_concurrency)
        saves = FairQueue(SAVE_SLOTS, self._weight_of)
        queue = TrainerQueue(self.futures, link, fair_queue, saves, self.sessions.is_wanted, self._suspects)
        steps = StepCommands(self.futures, self.models, batches, link, queue)
        timeout_s, patience_s = settings.command_timeout_s, settings.retry_deadline_s
        replay = Replay(self.journal, steps.compute, self.checkpoints, self.database, link, queue, timeout_s)
        residency = Residency(name, self.models, self.journal, replay, link, pool, patience_s)
        side = TrainerSide(link, queue, residency)
        side.commands[Kind.FORWARD] = side.commands[Kind.FORWARD_BACKWARD] = steps.forward_backward
        side.commands[Kind.OPTIM_STEP] = steps.optim_step
        return side

    def _build_runner(self, name: str, parts: TrainingParts, settings: GatewaySettings) -> CommandRunner:
        timeout_s, patience_s = settings.command_timeout_s, settings.retry_deadline_s
        pool, samplers = parts.pool, self.base_models.get(name).samplers
        for side in pool.sides:
            creating = CreationCommands(
                self.models, self.checkpoints, self.sessions, side.link, side.queue, samplers, timeout_s, patience_s,
                lambda: self.suspension.make_room(name), pool,
            )  # fmt: skip
            saving = SaveCommands(self.models, self.checkpoints, self.sampling, side.link, side.queue, timeout_s)
            side.commands.update(
                {
                    Kind.CREATE_MODEL: creating.create_model,
                    Kind.LOAD_STATE: creating.load_state,
                    Kind.SAVE_STATE: saving.save_state,
                    Kind.SAVE_FOR_SAMPLER: saving.save_for_sampler,
                    Kind.SAVE_EXTERNAL: saving.save_external,
                }
            )
        return CommandRunner(self.futures, self.models, pool, self.journal, parts.batches, settings.disk_wait_s)


def choose_discovery(service: str, addresses: Sequence[str], in_kubernetes: bool, namespace: str = "") -> Discovery:
    """Returns the discovery of one service.

    Args:
        service: Name of the setting that `addresses` come from.
        addresses: host:port of each replica, or one service:port in Kubernetes. If empty, the service has no replicas.
        in_kubernetes: Whether to watch the EndpointSlices of a Kubernetes service.
        namespace: The Kubernetes namespace of the service; if empty, the pod's own.

    Raises InvalidInput that names the wrong setting.
    """
    if not in_kubernetes or not addresses:
        return StaticDiscovery(addresses)
    if len(addresses) != 1:
        raise InvalidInput(
            f"--discovery kubernetes needs exactly one --{service} service:port, not {len(addresses)}", field=service
        )
    return KubernetesDiscovery(addresses[0], namespace)


def _check_nothing(who: str, files: Mapping[str, str]) -> None:
    """Accepts any files: without a trainer, the samplers' files are compared with the renderers'."""
