"""`mh.infer`: runs a network on a cluster; a stream of samples goes in, and answers come out in order."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.loader import length
from manyhands.executor.log import DeviceLog
from manyhands.executor.messages import runs_here
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadData, CaptureFailed, ManyhandsError, unknown
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.batching import joined, named_sample, refuse_pairs
from manyhands.graph.capture import capture
from manyhands.graph.folding import at_rest
from manyhands.graph.graph import Graph
from manyhands.graph.weights import Weights
from manyhands.inference.config import InferConfig
from manyhands.inference.options import InferOptions
from manyhands.inference.pulling import Pulled
from manyhands.inference.replanning import InferenceReplanner, sized
from manyhands.job.config import takes
from manyhands.job.evaluation import EXAMPLE_SAMPLES, inference_plan
from manyhands.job.metrics import cast
from manyhands.planner.inference import INFERENCE_STRATEGIES
from manyhands.plans.inference import plan_for, sample_seconds, stream_seconds
from manyhands.plans.planning import read_plan
from manyhands.runtime.carried_streaming import CarriedStreaming
from manyhands.runtime.living import rounds_between_looks
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.runtime.streaming import SUBMIT_SECONDS, Streaming
from manyhands.session.measuring import measure_who_stays
from manyhands.session.opening import expect_session, open_session
from manyhands.session.session import Say, Session

THROUGHPUT_LADDER = (1, 4)
"""Numbers of samples that are measured where several may share a batch."""
MANY_ROUNDS = 10**6
"""Stands for the number of rounds of a stream, which is unknown."""
MOST_OF_A_SAMPLE = 2**28
"""Most bytes of inputs that are tried as a single sample whose batch axis was forgotten."""


@takes(InferConfig)
def infer(
    model: nn.Module | Graph, inputs: torch.Tensor | Dataset[Any] | Iterable[Any], **options: Unpack[InferOptions]
) -> Any:
    """Return what `model` returns for `inputs`, in evaluation mode, computed by the cluster. The model is unchanged.

    Returns a tensor with samples on its first axis, or whatever else the model returns, as it returns it. `InferConfig`
    describes the options.

    inputs          a tensor with samples on its first axis, a data set (its inputs), or samples one after another
    """
    config = InferConfig.from_keywords("mh.infer", options)
    config.refuse_tokens("mh.infer")
    samples = samples_of(inputs)
    first = next(samples, None)
    if first is None:
        raise BadData("There are no samples.", hint="Give one at least.")
    if not isinstance(model, Graph):
        expect_session(config.cluster)
    graph = _graph_of(model, inputs, first, granularity=config.granularity, name=config.name)
    with open_with(config, graph) as running:
        return joined(running.graph, list(running.map(itertools.chain([first], samples))))


def samples_of(inputs: torch.Tensor | Dataset[Any] | Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over the samples."""
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        rows = torch.as_tensor(inputs)
        if not rows.dim():
            raise BadData("The inputs are one number.", hint="Give a tensor whose first axis is the samples'.")
        return iter(rows)
    if isinstance(inputs, Dataset):
        return (_input(inputs[index]) for index in range(length(inputs)))
    if isinstance(inputs, (dict, str, bytes)) or not isinstance(inputs, Iterable):
        raise BadData(
            f"The inputs are a {type(inputs).__name__}; they must be a tensor, a data set, or samples in a row.",
            hint="Of a model with several inputs each sample is a tuple or a dict of tensors.",
        )
    return iter(inputs)


def _input(sample: Any) -> Any:
    """Return the input of a data set's (input, target)."""
    return sample[0] if isinstance(sample, (tuple, list)) else sample


def _graph_of(model: nn.Module | Graph, inputs: Any, first: Any, *, granularity: str, name: str) -> Graph:
    """Return the graph of a model that takes such samples."""

    def taking(sample: Any) -> Graph:
        graph = model
        if not isinstance(graph, Graph):
            graph = captured_at_rest(graph, sample, granularity=granularity, name=name)
        named_sample(graph, sample)
        return graph

    try:
        return taking(first)
    except (BadData, CaptureFailed) as error:
        if not hasattr(inputs, "__array__") or not _fits(taking, torch.as_tensor(inputs)):
            raise
        shape = ", ".join(map(str, inputs.shape))
        raise BadData(
            f"The inputs have shape ({shape}), as one sample has: the batch axis is missing. "
            f"The model takes (samples, {shape}).",
            hint="For one sample give x[None], or x.unsqueeze(0).",
        ) from error


def _fits(taking: Callable[[Any], Graph], sample: torch.Tensor) -> bool:
    """Return whether all inputs together are one sample; more than fits one is not tried."""
    if sample.nbytes > MOST_OF_A_SAMPLE:
        return False
    try:
        taking(sample)
    except ManyhandsError:
        return False
    return True


def captured_at_rest(model: nn.Module, example: Any, *, granularity: str, name: str) -> Graph:
    """Return the graph of a model for samples like this one; floats are cast to the model's own type."""
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return capture(model, _repeated(cast(example, floats)), granularity=granularity, name=name)


def _repeated(sample: Any) -> Any:
    """Return a batch that repeats one sample."""
    if isinstance(sample, dict):
        return {key: _repeated(part) for key, part in sample.items()}
    if isinstance(sample, (tuple, list)):
        return tuple(_repeated(part) for part in sample)
    try:
        tensor = torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadData(f"A sample is a {type(sample).__name__}; it must be a tensor.") from error
    return tensor.unsqueeze(0).repeat(EXAMPLE_SAMPLES, *[1] * tensor.dim())


class Inference:
    """A network that answers: samples from any thread, answers in order, each once, whatever happens to devices.

        with Inference.open(model, example, cluster=mh.Cluster.local(4)) as running:
            future = running.submit(sample)
            for answer in running.map(samples): ...

    graph/batching.py describes what a sample is.
    """

    def __init__(
        self, session: Session, graph: Graph, cluster: Cluster, profile: Profile, objective: str,
        predicted_seconds: float, streaming: Streaming, ending: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        self.session, self.graph, self.cluster, self.profile = session, graph, cluster, profile
        self.objective = objective
        self.predicted_seconds = predicted_seconds
        """Predicted seconds by the first plan: of a sample alone, or from one answer of a stream to the next, according
        to the objective."""
        self.streaming = streaming
        self._ending = ending

    @classmethod
    @takes(InferConfig)
    def open(cls, model: nn.Module | Graph, example: Any = None, **options: Unpack[InferOptions]) -> Inference:
        """Capture, measure, plan and distribute the parts; return an inference that is ready to answer.

        example         one sample; a Graph needs none
        """
        config = InferConfig.from_keywords("mh.Inference.open", options)
        config.refuse_tokens("mh.Inference.open")
        return open_with(config, model, example)

    def __enter__(self) -> Inference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def close(self, *, cancel: bool = False) -> None:
        """Answer every submitted sample first, or drop them all with `cancel`; then end the workers started here.

        Samples that other threads submit meanwhile are refused.
        """
        try:
            self.streaming.close(cancel=cancel)
        finally:
            self._ending.close()

    def submit(self, sample: Any, limit_seconds: float = SUBMIT_SECONDS) -> Future[Any]:
        """Return a future of the answer to one sample. Callable from any thread; blocks while too many samples wait.

        A sample that does not fit raises BadData here.
        """
        return self.streaming.submit(named_sample(self.graph, sample), limit_seconds)

    def map(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield answers in the order of the samples, each as soon as it is ready. Samples may arrive slowly."""
        pulled = Pulled(self.submit, samples, 2 * self.streaming.most_waiting, lambda: self.streaming.error)
        try:
            yield from pulled.answers()
        finally:
            pulled.stop()

    def predicted_of(self, samples: int) -> float:
        """Return the simulated seconds per sample by the first plan: of `samples` in a row, if the objective is
        throughput."""
        if self.objective == "latency":
            return self.predicted_seconds
        first = self.streaming.order.plan
        return stream_seconds(first, self.graph.network, self.cluster, self.profile, samples) / samples

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self.streaming.plan

    @property
    def answered(self) -> int:
        """Number of samples answered."""
        return self.streaming.answered_samples

    @property
    def waiting(self) -> int:
        """Number of samples that no device works on yet."""
        return self.streaming.waiting

    @property
    def stage_rates(self) -> list[float | None]:
        """Samples per second that each stage of the plan could do; None: not known yet."""
        return self.streaming.pace.rates(self.plan)

    @property
    def reruns(self) -> int:
        """Number of times that a sample was run again because a device was lost."""
        return self.streaming.reruns

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """For each change of devices: seconds, devices, which were lost, how many samples were run again."""
        return self.streaming.recoveries

    @property
    def logs(self) -> Mapping[str, DeviceLog]:
        """Each device's log of its work by the last plan, once this is closed."""
        return self.streaming.logs

    @property
    def bytes_between(self) -> Counter[tuple[str, str]]:
        """(from, to) -> bytes, once this is closed; without the bytes that the coordinator sent."""
        return self.streaming.bytes_between


def open_with(config: InferConfig, model: nn.Module | Graph, example: Any = None, *, batch_size: int = 0) -> Inference:
    """Open an inference as configured: capture, measure, plan and distribute the parts. `batch_size`: in place of the
    plan's; 0: the plan's."""
    plan, objective, say = config.plan, config.objective, config.say
    if isinstance(model, Graph):
        graph = model
    else:
        expect_session(config.cluster)
        graph = captured_at_rest(model, example, granularity=config.granularity, name=config.name)
    refuse_pairs(graph)
    strategy = str(plan) if not isinstance(plan, Plan) and plan in INFERENCE_STRATEGIES else ""
    if strategy:  # a plan from the caller is for the network as it was captured
        graph = at_rest(graph)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(open_session(config.cluster, say=say, rendezvous=config.rendezvous))
        retry_policy = RetryPolicy("auto", config.min_devices, config.max_devices, session.rejoin_seconds)
        session.begin(retry_policy)
        ladder = (1,) if objective == "latency" else THROUGHPUT_LADDER
        machines, profile = measure_who_stays(
            session, graph, ladder[-1], retry_policy if strategy else None, ladder=ladder, say=say, training=False
        )
        chosen = sized(_planned(plan, graph, machines, profile, objective, config.home), batch_size)
        seconds = sample_seconds(chosen, graph.network, machines, profile, objective)
        replan = InferenceReplanner(session, graph, machines, profile, objective, strategy or "auto", config.home)
        replan.batch_size = batch_size
        sent = Weights.copied(graph, {spec.name for spec in graph.weights} - set(graph.carried))
        order = Order(
            graph, chosen, RunState(sent.tensors), 0, kernels=replan.kernels(chosen),
            memory_step=0 if config.memory else -1, wait_limit_seconds=config.limit_seconds,
            watch_every=rounds_between_looks(seconds * chosen.batch_size, MANY_ROUNDS),
        )  # fmt: skip
        streaming = (CarriedStreaming if graph.carried else Streaming)(
            session.coordinator, order, replan, retry_policy, most_waiting=config.most_waiting, log_event=_teller(say),
        )  # fmt: skip
        stack.callback(streaming.close, cancel=True)
        streaming.start()
        return Inference(session, graph, machines, profile, objective, seconds, streaming, stack.pop_all())


def _planned(
    plan: Plan | str | Path, graph: Graph, cluster: Cluster, profile: Profile, objective: str, home: str
) -> Plan:
    network = graph.network
    if isinstance(plan, Plan):
        chosen = plan
    elif str(plan) in INFERENCE_STRATEGIES:
        chosen = plan_for(network, cluster, profile, objective=objective, strategy=str(plan), home=home).plan
    else:
        chosen = read_plan(_plan_file(str(plan)), network, cluster)
    chosen = resolve(inference_plan(chosen) if chosen.is_training else chosen, network, cluster)
    runs_here(chosen, network)
    return chosen


def _plan_file(name: str) -> Path:
    path = Path(name)
    if not path.exists() and path.suffix not in (".yaml", ".yml", ".json"):
        raise unknown("plan file or strategy", name, INFERENCE_STRATEGIES)
    return path


def event_text(event: str, facts: Mapping[str, Any]) -> str:
    """Return what happened to the workers of a stream, in words; empty if it is not worth reporting."""
    if event == "lost":
        return str(facts["reason"])
    if event == "recovered":
        again = f", {facts['samples']} sample(s) run again" if facts["samples"] else ""
        return f"Going on with {', '.join(facts['devices'])} after {facts['seconds']:.2f} s{again}."
    if event == "waiting":
        return f"{facts['workers']} worker(s) left, {facts['least']} needed: waiting {facts['seconds']:g} s for others."
    if event == "note":
        return str(facts["text"])
    words = {"joined": "joins", "leaving": "leaves", "left": "has left"}
    return f"{facts['device']} {words[event]}." if event in words else ""


def _teller(say: Say | None) -> Any:
    def tell(event: str, /, **facts: Any) -> None:
        text = event_text(event, facts)
        if say is not None and text:
            say(text)

    return tell
