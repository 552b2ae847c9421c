"""Multi-turn reinforcement learning of vision-language models against any server that speaks the Tinker API.

Names are imported on first use, and the Tinker SDK, which takes seconds to load, only when it is used. So a wrong
address or setting is reported before. Environments and templates work without the SDK, and everything except
`GymnasiumEnvironment` works without gymnasium.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fovea_rollout.connection import connect as connect
    from fovea_rollout.environments.environment import Answer as Answer
    from fovea_rollout.environments.environment import Environment as Environment
    from fovea_rollout.environments.environment import Step as Step
    from fovea_rollout.environments.environment import ToolCall as ToolCall
    from fovea_rollout.environments.environment import register as register
    from fovea_rollout.environments.environment import unregister as unregister
    from fovea_rollout.environments.gymnasium_environment import GymnasiumEnvironment as GymnasiumEnvironment
    from fovea_rollout.environments.gymnasium_environment import Rules as Rules
    from fovea_rollout.environments.openenv_environment import OpenEnvEnvironment as OpenEnvEnvironment
    from fovea_rollout.environments.records import Record as Record
    from fovea_rollout.environments.records import load_records as load_records
    from fovea_rollout.environments.records import shuffled as shuffled
    from fovea_rollout.environments.verifiers_environment import VerifiersEnvironment as VerifiersEnvironment
    from fovea_rollout.environments.verifiers_environment import verifiers_sources as verifiers_sources
    from fovea_rollout.environments.verifiers_environment import verifiers_tools as verifiers_tools
    from fovea_rollout.evaluation import Evaluation as Evaluation
    from fovea_rollout.evaluation import evaluate as evaluate
    from fovea_rollout.loop.loggers import Logger as Logger
    from fovea_rollout.loop.loop import train as train
    from fovea_rollout.loop.loop_folder import resumed_training_client as resumed_training_client
    from fovea_rollout.loop.loop_settings import LoopSettings as LoopSettings
    from fovea_rollout.loop.player_cloning import ScriptedPlayer as ScriptedPlayer
    from fovea_rollout.loop.player_cloning import WarmUpSettings as WarmUpSettings
    from fovea_rollout.loop.player_cloning import warm_up as warm_up
    from fovea_rollout.loop.step_report import StepReport as StepReport
    from fovea_rollout.loop.training_batch import TrainingDatum as TrainingDatum
    from fovea_rollout.loop.training_batch import training_datums as training_datums
    from fovea_rollout.messages import Message as Message
    from fovea_rollout.messages import Picture as Picture
    from fovea_rollout.policies.experts_client import EXPERTS_HEADERS as EXPERTS_HEADERS
    from fovea_rollout.policies.experts_client import expert_source as expert_source
    from fovea_rollout.policies.grpc_policy import GrpcPolicy as GrpcPolicy
    from fovea_rollout.policies.policy import Chunk as Chunk
    from fovea_rollout.policies.policy import Policy as Policy
    from fovea_rollout.policies.policy import Portion as Portion
    from fovea_rollout.policies.policy import Sampled as Sampled
    from fovea_rollout.policies.policy import SamplingSettings as SamplingSettings
    from fovea_rollout.policies.policy import Tokens as Tokens
    from fovea_rollout.policies.policy import WeightVersions as WeightVersions
    from fovea_rollout.policies.resuming_policy import ResumingPolicy as ResumingPolicy
    from fovea_rollout.policies.tinker_policy import TinkerPolicy as TinkerPolicy
    from fovea_rollout.rollout import RolloutSettings as RolloutSettings
    from fovea_rollout.rollout import run_rollout as run_rollout
    from fovea_rollout.rollout import run_rollouts as run_rollouts
    from fovea_rollout.stopping import run as run
    from fovea_rollout.templates.template import ChatTemplate as ChatTemplate
    from fovea_rollout.trajectory import Failure as Failure
    from fovea_rollout.trajectory import Segment as Segment
    from fovea_rollout.trajectory import Trajectory as Trajectory
    from fovea_rollout.trajectory import Turn as Turn
    from fovea_rollout.viewer import write_viewer as write_viewer

_PUBLIC = {
    "connection": ("connect",),
    "environments.environment": ("Answer", "Environment", "Step", "ToolCall", "register", "unregister"),
    "evaluation": ("Evaluation", "evaluate"),
    "policies.experts_client": ("EXPERTS_HEADERS", "expert_source"),
    "policies.grpc_policy": ("GrpcPolicy",),
    "environments.gymnasium_environment": ("GymnasiumEnvironment", "Rules"),
    "loop.loggers": ("Logger",),
    "loop.loop": ("train",),
    "loop.loop_settings": ("LoopSettings",),
    "loop.loop_folder": ("resumed_training_client",),
    "messages": ("Message", "Picture"),
    "environments.openenv_environment": ("OpenEnvEnvironment",),
    "loop.player_cloning": ("ScriptedPlayer", "WarmUpSettings", "warm_up"),
    "policies.policy": ("Chunk", "Policy", "Portion", "Sampled", "SamplingSettings", "Tokens", "WeightVersions"),
    "environments.records": ("Record", "load_records", "shuffled"),
    "rollout": ("RolloutSettings", "run_rollout", "run_rollouts"),
    "loop.step_report": ("StepReport",),
    "templates.template": ("ChatTemplate",),
    "policies.resuming_policy": ("ResumingPolicy",),
    "policies.tinker_policy": ("TinkerPolicy",),
    "loop.training_batch": ("TrainingDatum", "training_datums"),
    "stopping": ("run",),
    "trajectory": ("Failure", "Segment", "Trajectory", "Turn"),
    "environments.verifiers_environment": ("VerifiersEnvironment", "verifiers_sources", "verifiers_tools"),
    "viewer": ("write_viewer",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
