"""`InferConfig`: every option of `mh.infer`, `mh.Inference.open`, `mh.generate` and `manyhands infer`, with default and
help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.facts.errors import BadValue
from manyhands.job.config import Config, Option, fields_of, option, varied
from manyhands.job.config_sections import MODEL, DevicesConfig, JobConfig

if TYPE_CHECKING:
    from manyhands.facts.plan import Plan

STRATEGIES = {
    "auto": "fastest", "single": "", "samples": "", "tiles": "", "deepthings": "", "modnn": "", "coates": "",
    "channels": "", "pipeline": "", "split": "",
}  # fmt: skip
MOST_WAITING = 64
NEW_TOKENS = 64
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(Config):
    """The network, its samples, and what becomes of the answers."""

    model: str = option(
        "", "A name from `manyhands models`, hf:TYPE or hf:FOLDER, or module:factory.", "--model", "-m",
        is_keyword=False, default_text=MODEL,
        other_flags={"network": Option("As --model, like hf:FOLDER.", metavar="MODEL", is_argument=True)},
    )  # fmt: skip
    weights: str = option(
        "", "A run's folder, or a .safetensors file.", "--weights", "-w", is_keyword=False, default_text="random"
    )
    input: str = option(
        "", "A folder of pictures, a picture, samples.npy, .npz, .json, or digits.", "--input", "-i", is_keyword=False
    )
    resize: bool = option(
        False, "Resize pictures, and arrays of them, to the network's height and width; else refused.", "--resize",
        kind=bool, is_keyword=False,
    )  # fmt: skip
    output: str = option(
        "", "Write answers here: .npy (all outputs) or .jsonl (a line each).", "--output", "-o", is_keyword=False
    )
    objective: str = option(
        "latency", "What to plan for.", "--for", noun="objective",
        choices={"latency": "one sample at a time", "throughput": "a stream of many"},
    )  # fmt: skip
    plan: Plan | str | Path = option(
        "auto", "A plan file (manyhands plan --for ... --out), or as --share.", "--plan", "-p",
        default_text="the plan of --share", in_python="Or an mh.Plan.",
        other_flags={
            "share": Option(
                "How to share the work.", ("--share", "-s"), choices=STRATEGIES, noun="way to share the work",
                default_text="auto",
            )
        },
    )  # fmt: skip
    home: str = option("", "The device that has the samples, which --share split and auto plan with.", "--home")
    decouple: str = option(
        "", "Decouple the network first: groups,shuffles,widening like 4,3,1.5.", "--decouple", is_keyword=False
    )
    shape: str = option(
        "", "Shape of one sample, like 3x64x64.", "--shape", is_keyword=False,
        default_text="the run's, or the model's own",
    )  # fmt: skip
    top: int = option(
        5, "So many classes of each answer.", "--top", kind=int, at_least=1, at_most=1000, is_keyword=False
    )
    raw: bool = option(False, "All numbers of each answer in place of classes.", "--raw", kind=bool, is_keyword=False)
    serve: int | None = option(
        None, "Answer HTTP requests at this port until Ctrl-C; 0: any.", "--serve", kind=int, at_least=0, at_most=65535,
        is_keyword=False,
    )  # fmt: skip
    host: str = option(
        "127.0.0.1", "Of --serve: 0.0.0.0 for others too, with TLS and a token.", "--host", is_keyword=False
    )
    bearer: str = option(
        "", "What clients must know.", "--bearer", variable="MANYHANDS_BEARER", is_keyword=False,
        default_text="a new one",
    )  # fmt: skip
    time_limit: float | None = option(
        None, "Of --serve: seconds that a request is given.", "--time-limit", kind=float, more_than=0, unit=" seconds",
        is_keyword=False, default_text=f"{REQUEST_SECONDS:g}",
    )  # fmt: skip
    most_waiting: int = option(
        MOST_WAITING, "Samples that wait; a caller that has more waits with them.", kind=int, at_least=1
    )
    memory: bool = option(False, "Count the bytes that each device holds, with the first samples (see `logs`).")


@dataclass(frozen=True, kw_only=True)
class TokensConfig(Config):
    """Prompts, and how the tokens that follow them are chosen. `mh.infer` takes none of these."""

    prompt: tuple[str, ...] = option(
        (), "Go on with this text; repeatable. A network of hf:FOLDER with the tokenizer's files.", "--prompt",
        is_list=True, is_keyword=False,
    )  # fmt: skip
    tokens: tuple[str, ...] = option(
        (), "Go on with these tokens, like 12,7,900; repeatable.", "--tokens", is_list=True, is_keyword=False
    )
    max_new_tokens: int = option(
        NEW_TOKENS, "The most tokens after each prompt.", "--max-new-tokens", kind=int, at_least=1, at_most=2**20
    )
    temperature: float | None = option(
        None, "Draw tokens, below 1 the likely ones more often. None: 1 beside top_k and top_p, else none are drawn.",
        "--temperature", kind=float, more_than=0, default_text="1 beside --top-k and --top-p, else none are drawn",
    )  # fmt: skip
    top_k: int | None = option(None, "Draw from so many of the likeliest tokens only.", "--top-k", kind=int, at_least=1)
    top_p: float | None = option(
        None, "Draw from the likeliest tokens only that together are at least this likely.", "--top-p", kind=float,
        more_than=0, at_most=1,
    )  # fmt: skip
    seed: int = option(0, "Seed of the draws.", "--seed", kind=int, at_least=0, at_most=2**63 - 1)
    end_tokens: tuple[int, ...] | None = option(
        None, "Tokens that end a text. None: the network's own, if its configuration names any; (): none."
    )
    chunk: int = option(
        8, "Tokens that are computed at once.", "--chunk", kind=int, at_least=1,
        at_most=1024,
    )  # fmt: skip

    @property
    def is_drawn(self) -> bool:
        """Whether tokens are drawn."""
        return not (self.temperature is None and self.top_k is None and self.top_p is None)

    def refuse_tokens(self, function: str) -> None:
        """Refuse options that only matter where text is generated: elsewhere they would be ignored."""
        fields = fields_of(type(self))
        for name in TokensConfig.__annotations__:
            if getattr(self, name) != fields[name].command_default:
                raise BadValue(f"{self.spelling(name)} is an option of mh.generate; {function} generates no text.")


@dataclass(frozen=True, kw_only=True)
class InferConfig(JobConfig, DevicesConfig, AnswersConfig, TokensConfig):
    """Every option of `mh.infer`, `mh.generate` and `manyhands infer`."""

    devices: int | None = varied(DevicesConfig, "devices", None, default_text="one a core, up to 4")

    def check(self) -> None:
        super().check()
        if not self.is_command:
            return
        given = [
            flag
            for flag, is_given in (
                ("--input", self.input), ("--serve", self.serve is not None), ("--prompt", self.prompt),
                ("--tokens", self.tokens),
            )
            if is_given
        ]  # fmt: skip
        if len(given) != 1:
            raise BadValue(
                f"{' and '.join(given)} both say what is to be answered." if given else "There is nothing to answer.",
                hint="Give one of them: --input FOLDER, --input samples.npy, --input digits or --serve 8080; or, to go "
                "on with a text, --prompt TEXT or --tokens 12,7,900.",
            )
        if not self.generates:
            self.refuse_tokens(f"manyhands infer {given[0]}")

    @property
    def generates(self) -> bool:
        """Whether a command goes on with prompts."""
        return bool(self.prompt or self.tokens)

    @property
    def plan_file(self) -> str:
        """The plan file, if one is given; else empty."""
        is_file = isinstance(self.plan, (str, Path)) and str(self.plan) not in STRATEGIES
        return str(self.plan) if is_file else ""

    @property
    def title(self) -> str:
        """The title of the job, which workers that join are shown."""
        return self.model or MODEL
