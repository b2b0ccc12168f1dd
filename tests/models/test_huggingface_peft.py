"""Small networks of transformers fine-tuned by PEFT, on stages: as plain PyTorch, with own losses and padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import manyhands as mh
from harness import ADAM, SGD, alone, plan_for, run, shared
from manyhands.facts.plan import Plan
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("huggingface_peft"),
]  # fmt: skip

WORDS, LENGTH, SAMPLES, STEPS, TOLERANCE = 32, 8, 4, 3, 1e-9
_LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
Batch = tuple[dict[str, Tensor], Tensor]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **_LAYERS,
    )  # fmt: skip
    module: nn.Module = transformers.BertForSequenceClassification(config).double()
    return module


def llama() -> nn.Module:
    """With its own loss, which transformers computes in float32 whatever the model's type, in float64."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=16, pad_token_id=0, use_cache=False, tie_word_embeddings=True,
        **_LAYERS,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).double()
    module.loss_function = next_word
    return module  # type: ignore[no-any-return]


def next_word(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sentences(seed: int) -> Batch:
    """Sentences of several lengths, with masks; what pads them has the label -100."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask.long()}, torch.where(mask, words, -100)


def classes(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed + 100)
    return sentences(seed)[0], torch.randint(0, 3, (SAMPLES,), generator=generator)


def lora(task: str | None, modules: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    return "LoraConfig", {"task_type": task, "r": 2, "target_modules": modules, **options}


Case = tuple[Callable[[], nn.Module], Callable[[int], Batch], tuple[str, dict[str, Any]]]
_BERT, _LLAMA = ["query", "value"], ["q_proj", "v_proj"]
CASES: dict[str, Case] = {
    "bert": (bert, classes, lora("SEQ_CLS", _BERT)),
    "bert biases": (bert, classes, lora("SEQ_CLS", _BERT, bias="lora_only")),
    "bert without task": (bert, classes, lora(None, _BERT)),
    "llama": (llama, sentences, lora("CAUSAL_LM", _LLAMA)),
    "llama last layer": (llama, sentences, lora("CAUSAL_LM", _LLAMA, layers_to_transform=[1])),
    "llama all, a norm too": (llama, sentences, lora("CAUSAL_LM", "all-linear", modules_to_save=["norm"])),
    "llama embedding": (llama, sentences, lora("CAUSAL_LM", ["embed_tokens", "q_proj"])),
    "llama some words": (llama, sentences, lora("CAUSAL_LM", ["q_proj"], trainable_token_indices=[1, 2])),
    "llama DoRA": (llama, sentences, lora("CAUSAL_LM", _LLAMA, use_dora=True)),
    "llama IA3": (llama, sentences, ("IA3Config", {"task_type": "CAUSAL_LM"})),
    "llama VeRA": (llama, sentences, ("VeraConfig", {"task_type": "CAUSAL_LM", "r": 2, "target_modules": _LLAMA})),
    "llama prefix": (llama, sentences, ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2})),
}


def fine_tuned(name: str, **more: Any) -> nn.Module:
    """The wrapped network; its adapters begin with drawn numbers, so that each one matters."""
    peft = pytest.importorskip("peft")
    base, _, (kind, options) = CASES[name]
    module: nn.Module = peft.get_peft_model(base(), getattr(peft, kind)(**options, **more)).double().train()
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def by_pytorch(module: nn.Module, batches: list[Batch]) -> list[float]:
    """Train a module by plain PyTorch, and return the losses."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for inputs, labels in batches:
        loss = module(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def staged(graph: Graph, shares: list[list[int]]) -> Plan:
    count = len(graph.network.layers)
    ends = [count * place // len(shares) for place in range(len(shares) + 1)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    return plan_for(graph, stages, batch_size=SAMPLES, micro_batches=SAMPLES // sum(shares[0]))


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_by_pytorch(name: str) -> None:
    """By samples, as a pipeline of two stages, and both."""
    module, batches = fine_tuned(name), [CASES[name][1](seed) for seed in range(STEPS)]
    inputs, labels = batches[0]
    graph = capture(module, inputs, target=labels, granularity="operators", name="adapted")
    plain = copy.deepcopy(module)
    losses = by_pytorch(plain, batches)
    state = {**graph.state, **dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for shares in ([[1, 3]], [[2], [2]], [[1, 1], [2]]):
        ran = run(graph, staged(graph, shares), batches, SGD)
        ran.assert_as_planned(STEPS)
        ran.assert_equals({name: tensor.detach() for name, tensor in state.items()}, losses, TOLERANCE)
        for executor in ran.executors.values():
            frozen = [n for n, weight in graph.network.weights.items() if not weight.trainable]
            assert all(executor.weights.tensors[n].grad is None for n in frozen if n in executor.weights.tensors)


def test_dropout_of_adapters_draws_as_one_device() -> None:
    module, batches = fine_tuned("llama", lora_dropout=0.1), [sentences(seed) for seed in range(STEPS)]
    inputs, labels = batches[0]
    graph = capture(module, inputs, target=labels, granularity="operators", name="adapted")
    assert sum(op.random for op in graph.network.ops) == 4
    for shares in ([[2], [2]], [[1, 1], [2]]):
        ran = run(graph, staged(graph, shares), batches, ADAM, seed=7)
        ran.assert_as_planned(STEPS)
        ran.assert_equals(*alone(graph, batches, ADAM, seed=7), TOLERANCE)


def test_a_network_that_mixes_samples_is_refused_with_the_line() -> None:
    """Prompt tuning puts the prompts of all samples before them at once."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    module = peft.get_peft_model(llama(), config).double().train()
    inputs, labels = sentences(0)
    graph = capture(module, inputs, target=labels, granularity="operators")
    with pytest.raises(mh.ManyhandsError, match=r"peft_model\.py:\d+.*mixes samples"):
        run(graph, staged(graph, [[2], [2]]), [(inputs, labels)], SGD)
    plain = copy.deepcopy(module)
    losses = by_pytorch(plain, [(inputs, labels)])
    ran = run(graph, staged(graph, [[SAMPLES], [SAMPLES]]), [(inputs, labels)], SGD)
    state = {**graph.state, **dict(plain.named_parameters()), **dict(plain.named_buffers())}
    ran.assert_equals({name: tensor.detach() for name, tensor in state.items()}, losses, TOLERANCE)


def test_a_method_that_branches_on_a_random_number_is_refused_with_the_line() -> None:
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(llama(), peft.LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=_LLAMA)).double()
    inputs, labels = sentences(0)
    with pytest.raises(mh.ManyhandsError, match=r"loha.layer\.py:\d+"):
        capture(module.train(), inputs, target=labels)


class Samples(Dataset[tuple[dict[str, Tensor], Tensor]]):
    def __init__(self, batches: list[Batch]) -> None:
        self.samples = [({k: v[row] for k, v in x.items()}, y[row]) for x, y in batches for row in range(SAMPLES)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return self.samples[index]


@pytest.mark.parametrize("name", ["bert", "llama last layer"])
def test_trained_over_processes_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    """The checkpoint holds what is trained; the adapter at the end is what PEFT loads into the base model."""
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    base, draw, _ = CASES[name]
    batches = [draw(seed) for seed in range(STEPS)]
    options: dict[str, Any] = {
        "optimizer": mh.Optimizer("SGD", lr=0.05, momentum=0.9), "batch_size": SAMPLES, "shuffle": False,
        "cluster": mh.Cluster.local(2), "plan": "pipeline", "folder": tmp_path / "run", "silence_seconds": 60.0,
    }  # fmt: skip
    said: list[str] = []
    data = Samples(batches)
    first = mh.train(fine_tuned(name), data, steps=2, say=said.append, **options)
    assert first.problems == []
    assert first.adapter == tmp_path / "run" / "adapter"
    assert any(str(first.adapter) in text for text in said)
    other = fine_tuned(name)
    with torch.no_grad():
        next(p for p in other.parameters() if not p.requires_grad).add_(0.01)
    with pytest.raises(mh.ManyhandsError, match="frozen weights are not those"):
        mh.train(other, data, steps=STEPS, resume=True, **options)
    module = fine_tuned(name)
    result = mh.train(module, data, steps=STEPS, resume=True, **options)
    plain = fine_tuned(name)
    assert result.losses == pytest.approx(by_pytorch(plain, batches), rel=TOLERANCE)
    for key, weight in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(key), weight, rtol=TOLERANCE, atol=1e-12)
    stored = load_file(result.checkpoint / "model.safetensors")
    trained = {key for key, weight in plain.named_parameters() if weight.requires_grad}
    assert {key for key in stored if key in dict(plain.named_parameters())} == trained
    assert result.adapter is not None
    loaded = peft.PeftModel.from_pretrained(base(), result.adapter).double().eval()
    inputs, _ = batches[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, plain.eval()(**inputs).logits, rtol=1e-9, atol=1e-9)
