"""manyhands: one training and inference machine out of the devices people already own.

    import manyhands as mh

    result = mh.train(model, dataset, loss=F.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.1), batch_size=64,
                      cluster=mh.Cluster.local(4))             # model now holds the trained weights

    graph = mh.capture(module, example_batch)                  # any nn.Module -> layers, shapes, costs
    planned = mh.plan(graph.network, mh.Cluster.local(4))      # who does what
    predicted = mh.simulate(planned.plan, graph.network, mh.Cluster.local(4))
    mh.explain(planned, graph.network, mh.Cluster.local(4)).binding.text    # what limits it

Names are loaded when first used, so that importing manyhands does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from manyhands.facts.version import __version__

if TYPE_CHECKING:
    from manyhands.data.given import Pairs, collect
    from manyhands.decoupling.decouple import Decoupled, decouple
    from manyhands.decoupling.report import DecoupleReport
    from manyhands.explaining.comparison import Comparison, compare
    from manyhands.explaining.explain import explain
    from manyhands.explaining.explanation import Explanation
    from manyhands.facts.cluster import Cluster
    from manyhands.facts.device import Device
    from manyhands.facts.errors import ManyhandsError
    from manyhands.facts.link import Link
    from manyhands.facts.network import Network
    from manyhands.facts.optimizer import Optimizer
    from manyhands.facts.plan import Plan, Stage
    from manyhands.facts.profile import Profile
    from manyhands.files.documents import load_cluster
    from manyhands.graph.capture import capture
    from manyhands.graph.graph import Graph
    from manyhands.graph.store import load as load_graph
    from manyhands.graph.store import save as save_graph
    from manyhands.inference.export import export_onnx
    from manyhands.inference.generate import Generated, generate
    from manyhands.inference.infer import Inference, infer
    from manyhands.job.callback import Callback, CallbackContext
    from manyhands.job.evaluation import EvaluateResult, evaluate
    from manyhands.job.result import TrainResult
    from manyhands.job.validation import Validated
    from manyhands.plans.pipelines import pipeline_plan
    from manyhands.plans.planned import Planned
    from manyhands.plans.planning import plan, read_plan
    from manyhands.plans.simulating import simulate
    from manyhands.plans.tiles import tile_plan
    from manyhands.profiler.store import profile_network as profile
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.split.job import SplitResult
    from manyhands.split.training import split_train
    from manyhands.training.callbacks import CSV, BestCheckpoint, EarlyStopping, TensorBoard
    from manyhands.training.mlflow_logger import MLflow
    from manyhands.training.prepare import PreparedStep, prepare
    from manyhands.training.train import train
    from manyhands.training.trainer import Trainer
    from manyhands.training.training_arguments import from_training_arguments
    from manyhands.training.wandb_logger import WandB
    from manyhands.weights.adapters import save_adapter
    from manyhands.weights.mapped import map_weights, without_weights

_HOMES = {
    "capture": ("graph.capture", "capture"),
    "Graph": ("graph.graph", "Graph"),
    "save_graph": ("graph.store", "save"),
    "load_graph": ("graph.store", "load"),
    "profile": ("profiler.store", "profile_network"),
    "plan": ("plans.planning", "plan"),
    "Planned": ("plans.planned", "Planned"),
    "read_plan": ("plans.planning", "read_plan"),
    "simulate": ("plans.simulating", "simulate"),
    "explain": ("explaining.explain", "explain"),
    "Explanation": ("explaining.explanation", "Explanation"),
    "compare": ("explaining.comparison", "compare"),
    "Comparison": ("explaining.comparison", "Comparison"),
    "pipeline_plan": ("plans.pipelines", "pipeline_plan"),
    "tile_plan": ("plans.tiles", "tile_plan"),
    "train": ("training.train", "train"),
    "Callback": ("job.callback", "Callback"),
    "CallbackContext": ("job.callback", "CallbackContext"),
    "EarlyStopping": ("training.callbacks", "EarlyStopping"),
    "BestCheckpoint": ("training.callbacks", "BestCheckpoint"),
    "CSV": ("training.callbacks", "CSV"),
    "TensorBoard": ("training.callbacks", "TensorBoard"),
    "WandB": ("training.wandb_logger", "WandB"),
    "MLflow": ("training.mlflow_logger", "MLflow"),
    "Validated": ("job.validation", "Validated"),
    "TrainResult": ("job.result", "TrainResult"),
    "split_train": ("split.training", "split_train"),
    "SplitResult": ("split.job", "SplitResult"),
    "prepare": ("training.prepare", "prepare"),
    "PreparedStep": ("training.prepare", "PreparedStep"),
    "Trainer": ("training.trainer", "Trainer"),
    "from_training_arguments": ("training.training_arguments", "from_training_arguments"),
    "collect": ("data.given", "collect"),
    "Pairs": ("data.given", "Pairs"),
    "export_onnx": ("inference.export", "export_onnx"),
    "evaluate": ("job.evaluation", "evaluate"),
    "EvaluateResult": ("job.evaluation", "EvaluateResult"),
    "infer": ("inference.infer", "infer"),
    "Inference": ("inference.infer", "Inference"),
    "generate": ("inference.generate", "generate"),
    "Generated": ("inference.generate", "Generated"),
    "Coordinator": ("runtime.coordinator", "Coordinator"),
    "Optimizer": ("facts.optimizer", "Optimizer"),
    "Cluster": ("facts.cluster", "Cluster"),
    "Device": ("facts.cluster", "Device"),
    "Link": ("facts.cluster", "Link"),
    "Network": ("facts.network", "Network"),
    "Plan": ("facts.plan", "Plan"),
    "Stage": ("facts.plan", "Stage"),
    "Profile": ("facts.profile", "Profile"),
    "ManyhandsError": ("facts.errors", "ManyhandsError"),
    "save_adapter": ("weights.adapters", "save_adapter"),
    "map_weights": ("weights.mapped", "map_weights"),
    "without_weights": ("weights.mapped", "without_weights"),
    "load_cluster": ("files.documents", "load_cluster"),
    "decouple": ("decoupling.decouple", "decouple"),
    "Decoupled": ("decoupling.decouple", "Decoupled"),
    "DecoupleReport": ("decoupling.report", "DecoupleReport"),
}

__all__ = [
    "CSV", "BestCheckpoint", "Callback", "CallbackContext", "Cluster", "Comparison", "Coordinator", "DecoupleReport",
    "Decoupled", "Device", "EarlyStopping", "EvaluateResult", "Explanation", "Generated", "Graph", "Inference",
    "Link", "MLflow", "ManyhandsError", "Network", "Optimizer", "Pairs", "Plan", "Planned", "PreparedStep", "Profile",
    "SplitResult", "Stage", "TensorBoard", "TrainResult", "Trainer", "Validated", "WandB", "__version__", "capture",
    "collect", "compare", "decouple", "evaluate", "explain", "export_onnx", "from_training_arguments", "generate",
    "infer", "load_cluster", "load_graph", "map_weights", "pipeline_plan", "plan", "prepare", "profile", "read_plan",
    "save_adapter", "save_graph", "simulate", "split_train", "tile_plan", "train", "without_weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'manyhands' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(import_module(f"manyhands.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
