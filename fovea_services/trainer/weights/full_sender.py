"""The ranks' side of a push of full parameters: gathering them and sending them to samplers."""

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from torch import Tensor

from fovea.wire.errors import Unavailable
from fovea.wire.manifest import buckets
from fovea_services.trainer.command_queue import BroadcastFull, OpenGroup
from fovea_services.trainer.model.sharding import ShardedModel
from fovea_services.trainer.model.trained_model import FullModel
from fovea_services.trainer.ranks.control_group import ControlGroup
from fovea_services.trainer.settings import TrainerSettings
from fovea_services.trainer.weights import weight_files
from fovea_services.trainer.weights.snapshot_store import packed
from fovea_services.trainer.weights.snapshot_taker import SnapshotTaker
from fovea_services.trainer.weights.transfer_groups import TransferGroups

logger = logging.getLogger(__name__)


class FullSender:
    """Sends full parameters from several ranks. Methods are collective.

    Args:
        settings: Settings of the trainer.
        control: Control group of the rank's thread.
        sharded: The base model.
        snapshots: Finds the parameters of a snapshot.
        groups: Transfer groups, on ranks that send weights.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        control: ControlGroup,
        sharded: ShardedModel,
        snapshots: SnapshotTaker,
        groups: TransferGroups | None,
    ) -> None:
        self._control = control
        self._sharded = sharded
        self._snapshots = snapshots
        self._groups = groups
        self._count, self._sender = settings.sender_count, settings.sender_of(control.rank)

    def open_group(self, command: OpenGroup) -> None:
        """Joins a transfer group on the senders other than rank 0, after rank 0 and the samplers have joined.

        Raises:
            Unavailable: A sender reached no samplers; raised on all ranks.
        """

        def join() -> None:
            if self._groups is None or not self._control.rank:
                return
            self._groups.close_others(command.kept)
            try:
                self._groups.open(
                    command.group_id,
                    command.world_size,
                    command.backend,
                    command.join_timeout_s,
                    command.broadcast_timeout_s,
                )
            except RuntimeError as failure:
                raise Unavailable(f"rank {self._control.rank} of the trainer reached no samplers: {failure}") from None

        self._control.agree(join)

    def broadcast(self, command: BroadcastFull, live: FullModel | None) -> str:
        """Gathers and sends a snapshot. Returns the error of the transfer, or an empty string.

        After a failed transfer the gathering continues, because the other ranks are in the middle of it.

        Args:
            command: The command.
            live: The full-parameter model, if one exists.
        """
        _, specs = self._snapshots.describe_full(command.snapshot_id, live)
        shards = self._snapshots.locals_of(command.snapshot_id, live)
        like = dict(self._sharded.named_shards())
        whole = weight_files.gathered(shards, like, self._sharded.module.expert_layouts)
        error = ""
        sending: Future[str] | None = None
        with ThreadPoolExecutor(1, "broadcast") as thread:
            # While one bucket is being sent, the next one is gathered.
            for number, bucket in enumerate(buckets(specs, command.bucket_bytes)):
                tensors = islice(whole, len(bucket))
                if self._groups is None or number % self._count != self._sender or error:
                    deque(tensors, maxlen=0)  # only takes part in the gathering
                    continue
                data = packed(bucket, tensors)
                error = sending.result() if sending else ""
                sending = None if error else thread.submit(_send, self._groups, command, data)
        error = error or (sending.result() if sending else "")
        return next(filter(None, self._control.gather(error)), "")


def _send(groups: TransferGroups, command: BroadcastFull, data: Tensor) -> str:
    """Sends a bucket. Returns the error, or an empty string."""
    try:
        groups.get(command.group_id).send(data, command.timeout_s)
    except RuntimeError as failure:
        logger.warning("broadcast over %s failed: %s", command.group_id, failure)
        return f"the broadcast failed: {failure}"
    return ""
