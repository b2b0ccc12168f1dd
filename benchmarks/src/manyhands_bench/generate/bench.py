"""`manyhands bench generate`: tokens per second of greedy generation on one device and over workers of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import manyhands as mh
from manyhands.inference.config import InferConfig
from manyhands.inference.generate import Generated, TokenNetwork, generate_on, token_network
from manyhands.lab.removal import missing
from manyhands.profiler.this_machine import identify
from manyhands.runtime.coordinator import Coordinator
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.generate.decoder import Decoder, DecoderSize, plain_texts
from manyhands_bench.generate.small_devices import QUICK, SmallDevices, bench_small_devices


@dataclass(frozen=True)
class GenerateOptions:
    """The settings of the bench."""

    size: DecoderSize = field(default_factory=DecoderSize)
    prompt_tokens: int = 64
    new_tokens: int = 64
    prompts: int = 4
    """Prompts at a time, in the second half of the figures."""
    repetitions: int = 5
    small: SmallDevices = field(default_factory=SmallDevices)

    @classmethod
    def quick(cls) -> GenerateOptions:
        size = DecoderSize(layers=4, width=128, heads=4, vocabulary=1000, positions=64)
        return cls(size, prompt_tokens=16, new_tokens=16, repetitions=2, small=QUICK)


def bench_generate(options: GenerateOptions, on_progress: Progress | None = None) -> Figures:
    """Return tokens per second, prompts included: medians of interleaved repetitions, and shares of plain PyTorch's."""
    say = on_progress or (lambda text: None)
    decoder = Decoder(options.size).eval()
    generator = torch.Generator().manual_seed(1)
    shape = (options.prompts, options.prompt_tokens)
    prompts: list[list[int]] = torch.randint(options.size.vocabulary, shape, generator=generator).tolist()
    say("capturing the decoder")
    config = InferConfig(max_new_tokens=options.new_tokens)
    network = token_network(config, decoder, options.prompts, options.prompt_tokens + options.new_tokens)
    rates: dict[str, list[float]] = {}
    is_equal = True
    with Coordinator.local_cluster(mh.Cluster.local(2), threads=1) as coordinator:
        for number in range(options.repetitions):
            for count in (1, options.prompts):
                say(f"repetition {number + 1} of {options.repetitions}, {count} prompt(s) at a time")
                expected, seconds = _plain(decoder, prompts[:count], options.new_tokens)
                ending = "" if count == 1 else f"_{count}_prompts"
                new = count * options.new_tokens
                rates.setdefault(f"plain{ending}", []).append(new / seconds)
                for workers, plan in ((1, "single"), (2, "pipeline")):
                    generated = _generated(coordinator, network, prompts[:count], options, plan)
                    is_equal = is_equal and [list(tokens) for tokens in generated.tokens] == expected
                    name = f"{workers}_worker{'s' if workers > 1 else ''}{ending}"
                    rates.setdefault(name, []).append(generated.tokens_per_second)
                    rates.setdefault(f"{name}_following", []).append(generated.following_per_second)
    figures: Figures = {f"{name}_tokens_per_second": statistics.median(values) for name, values in rates.items()}
    for ending in ("", f"_{options.prompts}_prompts"):
        for name in ("1_worker", "2_workers"):
            shares = [ours / plain for ours, plain in zip(rates[f"{name}{ending}"], rates[f"plain{ending}"])]
            figures[f"{name}{ending}_over_plain"] = statistics.median(shares)
    figures["tokens_equal"] = int(is_equal)
    figures["parameters"] = sum(weight.numel() for weight in decoder.parameters())
    figures["machine"] = identify(1).text
    figures["settings"] = (
        f"{options.size}, float32, {options.prompt_tokens} prompt tokens, {options.new_tokens} new ones, "
        f"{options.repetitions} interleaved repetitions, one thread a process"
    )
    if reason := missing():
        figures["small_skipped"] = f"devices that cannot hold the network need the lab: {reason}"
        return figures
    return figures | bench_small_devices(options.small, say)


def _plain(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], float]:
    with _one_thread():
        began = time.monotonic()
        texts = plain_texts(decoder, prompts, count)
        return texts, time.monotonic() - began


def _generated(
    coordinator: Coordinator, network: TokenNetwork, prompts: Sequence[Sequence[int]], options: GenerateOptions,
    plan: str,
) -> Generated:  # fmt: skip
    config = InferConfig(cluster=coordinator, plan=plan, max_new_tokens=options.new_tokens)
    return generate_on(config, network, prompts)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
