"""`mh.generate`: goes on with prompts over a pipeline, with a cache of keys and values where each layer lies.

A token of a prompt is a sample. Its answer, the numbers for the next token, comes to this process, which chooses one
and submits it as the prompt's next sample. Prompts are driven in waves: the tokens of a wave are computed in one batch,
and while one stage has a wave, the others have other waves.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import torch
from torch import Tensor, nn

from manyhands.facts.errors import BadData, BadValue, TimedOut
from manyhands.facts.plan import Plan
from manyhands.graph.capture import capture
from manyhands.graph.folding import at_rest
from manyhands.graph.graph import Graph
from manyhands.inference.config import InferConfig
from manyhands.inference.decoders import CELLS, TOKENS, TokenStep, is_of_transformers, token_step
from manyhands.inference.infer import Inference, open_with
from manyhands.inference.options import InferOptions
from manyhands.inference.prompts import Prompts, prompts_of
from manyhands.inference.sampling import Sampling, generator_of
from manyhands.inference.token_cache import TokenCache, cells_of
from manyhands.job.config import takes
from manyhands.runtime.carried_streaming import CarriedLost, CarriedStreaming
from manyhands.session.opening import expect_session

if TYPE_CHECKING:
    OnToken = Callable[[int, int], None]

MOST_PROMPTS = 32
"""The most prompts that are gone on with at a time: the others wait for the cells of one that has ended."""
MOST_RESULT_BYTES = 2**20
"""The most bytes that a batch's answers are to have: where all numbers of every token are sent back, fewer tokens are
computed at once."""
_MOST_RESTARTS = 8
"""The most times that a prompt begins again without a new token: its devices come and go."""


@dataclass(frozen=True)
class Generated:
    """The tokens that follow each prompt, and how fast they came."""

    tokens: tuple[tuple[int, ...], ...]
    """The new tokens of each prompt, the one that ended it included."""
    prompts: tuple[tuple[int, ...], ...]
    seconds: float
    """From the first prompt's first token to the last new one."""
    first_seconds: float
    """Until the first new token: the first prompts have been read."""
    plan: Plan
    restarts: int = 0
    """How often a prompt was read again because devices came or went."""

    @property
    def count(self) -> int:
        """The number of new tokens."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, prompts included."""
        return self.count / max(self.seconds, 1e-9)

    @property
    def following_per_second(self) -> float:
        """New tokens a second once the first was there."""
        return max(0, self.count - 1) / max(self.seconds - self.first_seconds, 1e-9)

    @property
    def sequences(self) -> list[list[int]]:
        """Each prompt with what follows it."""
        return [[*prompt, *new] for prompt, new in zip(self.prompts, self.tokens)]


@takes(InferConfig)
def generate(
    model: nn.Module, input_ids: Prompts, attention_mask: Tensor | None = None, *, on_token: OnToken | None = None,
    **options: Unpack[InferOptions],
) -> Generated:  # fmt: skip
    """Return the tokens that `model` goes on with after each prompt, computed by the cluster. The model is unchanged.

    They are those of one device, drawn or not. `InferConfig` describes the options.

    model           a causal language model of transformers, or a module with forward(input_ids, cache)
                    (docs/howto/generate-text.md)
    input_ids       token numbers: a tensor, a row for each prompt, or lists of any lengths
    attention_mask  0 where a tensor's row has padding
    on_token        is called with each new token: the number of its prompt, and the token
    """
    config = InferConfig.from_keywords("mh.generate", options)
    return generate_with(config, model, prompts_of(input_ids, attention_mask), on_token)


def generate_with(
    config: InferConfig, model: nn.Module, prompts: Sequence[Sequence[int]], on_token: OnToken | None = None,
    on_ready: Callable[[Inference], None] | None = None,
) -> Generated:  # fmt: skip
    """Return what follows each prompt, as configured. `on_ready` is called once the devices have their parts."""
    expect_session(config.cluster)
    _check_tokens(model, prompts)
    length = max(map(len, prompts)) + config.max_new_tokens
    network = token_network(config, model, min(len(prompts), MOST_PROMPTS), length)
    return generate_on(config, network, prompts, on_token, on_ready)


def generate_on(
    config: InferConfig, network: TokenNetwork, prompts: Sequence[Sequence[int]], on_token: OnToken | None = None,
    on_ready: Callable[[Inference], None] | None = None,
) -> Generated:  # fmt: skip
    """Return what follows each prompt, by a network that was captured for as many prompts and as long texts."""
    texts = [_Text(number, list(prompt), config.seed) for number, prompt in enumerate(prompts)]
    with open_with(config, network.graph, batch_size=_batch_size(network.graph, config.chunk)) as running:
        if on_ready is not None:
            on_ready(running)
        return _Generation(running, config, network, on_token).run(texts)


def sampling_of(config: InferConfig) -> Sampling:
    """Return how tokens are chosen."""
    temperature = config.temperature if config.temperature is not None or not config.is_drawn else 1.0
    return Sampling(temperature, config.top_k, config.top_p)


def ends_of(model: nn.Module) -> tuple[int, ...]:
    """Return the tokens that end a text, as a configuration of transformers names them."""
    settings = getattr(model, "generation_config", None) if is_of_transformers(model) else None
    ends = getattr(settings, "eos_token_id", None)
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (int(ends),)


@dataclass(frozen=True)
class TokenNetwork:
    """A decoder captured for one token, which carries its cache."""

    graph: Graph
    prompts: int
    """How many prompts the cache holds."""
    length: int
    """How many tokens of each, prompt and new ones."""
    kept: int | None
    """How many numbers it returns for a token (see TokenStep)."""
    vocabulary: int
    ends: frozenset[int]
    """The tokens that end a text."""


def token_network(config: InferConfig, model: nn.Module, prompts: int, length: int) -> TokenNetwork:
    """Return a decoder captured with a cache for so many prompts of at most `length` tokens."""
    kept = config.top_k if config.is_drawn else 0
    step = token_step(model, prompts, length, kept)
    example = {TOKENS: torch.zeros(2, 1, dtype=torch.int64), CELLS: torch.ones(2, 1, dtype=torch.int64)}
    name = config.name or type(model).__name__
    graph = capture(step, example, granularity=config.granularity, name=name)
    ends = frozenset(config.end_tokens if config.end_tokens is not None else ends_of(model))
    return TokenNetwork(carrying(graph, step), prompts, length, step.kept, step.vocabulary, ends)


def carrying(graph: Graph, step: TokenStep) -> Graph:
    """Return the graph with its cache marked as what every pass carries on."""
    assert isinstance(step.cache, TokenCache)
    names = {f"cache.{name}" for name in step.cache.carried}
    written = {node.updates for node in graph.nodes if node.updates}
    if written != names:
        others = ", ".join(sorted(written ^ names))
        raise BadValue(
            f"{graph.name} writes other buffers than its cache, or not all of it: {others}.",
            hint="A decoder keeps nothing else from one token to the next.",
        )
    return at_rest(msgspec.structs.replace(graph, carried=tuple(sorted(names))))


def _check_tokens(model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse tokens that the network does not have, before any device is asked."""
    table = next((child for child in model.modules() if isinstance(child, nn.Embedding)), None)
    for number, prompt in enumerate(prompts):
        bad = next((token for token in prompt if token < 0 or (table and token >= table.num_embeddings)), None)
        if bad is not None:
            count = f" to {table.num_embeddings - 1}" if table else ""
            raise BadData(f"Prompt {number} has token {bad}; tokens are numbers from 0{count}.")


def _batch_size(graph: Graph, chunk: int) -> int:
    answer = sum(graph.network.tensors[name].bytes_per_sample for name in graph.outputs)
    return max(1, min(chunk, MOST_RESULT_BYTES // max(1, answer)))


@dataclass(eq=False)
class _Text:
    """A prompt and what follows it so far."""

    number: int
    prompt: list[int]
    seed: int
    new: list[int] = field(default_factory=list)
    place: int = -1
    """The row of the cache that it has."""
    written: int = 0
    """How many of its tokens have been submitted since `since`."""
    restarts: int = 0
    """Restarts since the last new token."""
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = generator_of(self.seed, self.number)

    def pending(self) -> list[int]:
        """Return the tokens that are not in the cache yet."""
        return (self.prompt + self.new)[self.written :]


@dataclass(eq=False)
class _Wave:
    """Texts whose next tokens are computed together, and the answers that are awaited."""

    texts: list[_Text]
    since: int = -1
    """What is carried was begun at this count of the stream."""
    futures: list[Future[Any]] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    """Which answer is that to each text's last token."""


class _Generation:
    """Drives the texts of one job through the stream."""

    def __init__(
        self, running: Inference, config: InferConfig, network: TokenNetwork, on_token: OnToken | None
    ) -> None:
        assert isinstance(running.streaming, CarriedStreaming)
        self.running, self.stream = running, running.streaming
        self.config, self.sampling, self.network = config, sampling_of(config), network
        self.on_token = on_token
        self._done: queue.Queue[_Wave] = queue.Queue()
        self._began, self._first_seconds, self.restarts = 0.0, math.nan, 0

    def run(self, texts: list[_Text]) -> Generated:
        at_once = min(len(texts), self.network.prompts)
        self._began = time.monotonic()
        waiting, ended = deque(texts), list[_Text]()
        waves = [_Wave(group) for group in self._groups(waiting, at_once)]
        for wave in waves:
            self._submit(wave)
        while len(ended) < len(texts):
            wave = self._next_wave()
            ended += self._answered(wave)
            for text in [text for text in wave.texts if text in ended]:
                wave.texts.remove(text)
                if waiting:
                    wave.texts.append(self._seated(waiting.popleft(), text.place))
            if wave.texts:
                self._submit(wave)
        seconds = time.monotonic() - self._began
        return Generated(
            tuple(tuple(text.new) for text in texts), tuple(tuple(text.prompt) for text in texts), seconds,
            self._first_seconds, self.running.plan, self.restarts,
        )  # fmt: skip

    def _groups(self, waiting: deque[_Text], at_once: int) -> Iterator[list[_Text]]:
        """Yield the texts of each wave: as many waves as stages, none larger than a batch."""
        stages = len(self.running.plan.stages)
        size = max(1, min(self.running.plan.step_size, -(-at_once // stages)))
        for first in range(0, at_once, size):
            yield [self._seated(waiting.popleft(), place) for place in range(first, min(first + size, at_once))]

    def _seated(self, text: _Text, place: int) -> _Text:
        text.place = place
        return text

    def _submit(self, wave: _Wave) -> None:
        """Submit the tokens of a wave that are not in the cache; all of them, where it is gone."""
        while True:
            since = self.stream.carried_since
            if since != wave.since:
                for text in wave.texts:
                    text.written = 0
            wave.since = since
            samples: list[dict[str, Tensor]] = []
            wave.lasts = []
            for text in wave.texts:
                samples += self._samples(text)
                wave.lasts.append(len(samples) - 1)
            try:
                wave.futures = self.stream.submit_all(samples, since)
                break
            except CarriedLost:
                self._note_restart(wave)
        for text in wave.texts:
            text.written += len(text.pending())
        wave.futures[-1].add_done_callback(lambda _: self._done.put(wave))  # a stream answers in order

    def _samples(self, text: _Text) -> list[dict[str, Tensor]]:
        tokens = text.pending()
        cells = cells_of(text.place, text.written, len(tokens), self.network.length)
        return [{TOKENS: torch.tensor([token]), CELLS: torch.tensor([cell])} for token, cell in zip(tokens, cells)]

    def _next_wave(self) -> _Wave:
        try:
            return self._done.get(timeout=self.config.limit_seconds + 60)
        except queue.Empty:
            raise TimedOut(f"No token came for {self.config.limit_seconds + 60:g} s.") from None

    def _answered(self, wave: _Wave) -> list[_Text]:
        """Choose the next token of every text of a wave; return those that have ended. Nothing is chosen where an
        answer is missing, as the devices have changed."""
        errors = [error for future in wave.futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, CarriedLost):
                raise error
        if errors:
            self._note_restart(wave)
            wave.since = -1
            return []
        ended = []
        for text, last in zip(wave.texts, wave.lasts):
            token = self._chosen(wave.futures[last].result(), text)
            text.new.append(token)
            text.restarts = 0
            if math.isnan(self._first_seconds):
                self._first_seconds = time.monotonic() - self._began
            if self.on_token is not None:
                self.on_token(text.number, token)
            if token in self.network.ends or len(text.new) >= self.config.max_new_tokens:
                ended.append(text)
        return ended

    def _note_restart(self, wave: _Wave) -> None:
        for text in wave.texts:
            text.restarts += 1
            self.restarts += 1
            if text.restarts > _MOST_RESTARTS:
                raise TimedOut(f"The devices changed {_MOST_RESTARTS} times before a token of prompt {text.number}.")

    def _chosen(self, answer: Any, text: _Text) -> int:
        if self.network.kept == 0:
            return int(answer)
        if self.network.kept is not None:
            largest, places = answer
            nothing = torch.full((self.network.vocabulary,), float("-inf"), dtype=largest.dtype)
            answer = nothing.scatter(0, places, largest)
        return self.sampling.next_token(answer, text.generator)
