"""`transformers.TrainingArguments` as options of `mh.train`.

    arguments = TrainingArguments("out", learning_rate=2e-5, warmup_steps=100, bf16=True)
    result = mh.train(model, data, **mh.from_training_arguments(arguments, model, data))

Every field that is not at its default is mapped, or refused because the training would be another, or named in one
warning because it says nothing about the numbers. Optimizer and schedule are made by transformers' own functions.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from manyhands.data.loader import length
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.precision import BF16, FLOAT32, FP16

MAPPED = frozenset({
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_grad_norm", "bf16", "fp16",
    "eval_strategy", "eval_steps", "seed", "report_to", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "do_train", "do_eval",
})  # fmt: skip
"""Fields that `from_training_arguments` reads."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim` whose classes are torch.optim's."""
REFUSED = {
    "label_smoothing_factor": "Pass loss= to mh.train: a function with label_smoothing.",
    "neftune_noise_alpha": "Leave it out.",
    "deepspeed": "Leave it out: manyhands plans how devices share the work.",
    "fsdp": "Leave it out: manyhands plans how devices share the work.",
    "torch_compile": "Leave it out: workers run the captured graph.",
    "use_liger_kernel": "Leave it out: workers run the captured graph.",
    "auto_find_batch_size": "Leave it out: the planner knows what fits before the first step.",
    "resume_from_checkpoint": "Leave it out; folder= and resume=True go on with a run of manyhands.",
    "train_sampling_strategy": "Leave it out; lengths= makes batches of samples of similar length.",
    "group_by_length": "Leave it out; lengths= makes batches of samples of similar length.",
    "data_seed": "Leave it out: seed is that of the order, too.",
    "optim_target_modules": "Leave it out.",
    "parallelism_config": "Leave it out: manyhands plans how devices share the work.",
    "bf16_full_eval": "Leave it out: validations compute in the precision of the training.",
    "fp16_full_eval": "Leave it out: validations compute in the precision of the training.",
    "eval_delay": "Leave it out.",
    "full_determinism": "Leave it out; seed= makes runs repeatable.",
    "push_to_hub": "Leave it out, and push the trained model: model.push_to_hub(...).",
}
"""Fields by which the training would be another one -> what to do."""
LOGGERS = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}
"""Values of `report_to` -> the callback that does it."""


def from_training_arguments(
    arguments: Any, model: nn.Module, data: Any, *, validate: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the options of `mh.train`, its optimizer and scheduler included, that a `transformers.TrainingArguments`
    stands for, so that a script for transformers' Trainer keeps its settings.

    validate    the data of validations, if eval_strategy is "steps" or "epoch"
    options     options of `mh.train` that are to be as they are given here
    """
    if not hasattr(arguments, "per_device_train_batch_size") or not hasattr(arguments, "__dataclass_fields__"):
        raise BadValue(
            f"arguments is a {type(arguments).__name__}; it must be a transformers.TrainingArguments.",
            hint="Options of mh.train can be given to it as they are.",
        )
    set_fields = {name: getattr(arguments, name) for name in _set(arguments)}
    for name, hint in REFUSED.items():
        if set_fields.get(name):
            raise BadValue(f"TrainingArguments has {name}={set_fields[name]!r:.60}, which is not honoured.", hint=hint)
    named = {**_batches(arguments, model, data), **_updates(arguments), **_validations(arguments, validate)}
    steps = _steps(arguments, data, named.get("batch_size"))
    optimizer, scheduler = _optimizer(arguments, model, steps)
    named |= {"steps": steps, "optimizer": optimizer, "scheduler": {"scheduler": scheduler, "interval": "step"}}
    named |= {"seed": arguments.seed, "callbacks": _callbacks(arguments)}
    if arguments.output_dir is not None and "output_dir" in set_fields:
        named["folder"] = arguments.output_dir
    if arguments.load_best_model_at_end:
        warnings.warn(
            "load_best_model_at_end: the best weights are kept in result.best_checkpoint; the model has the last ones.",
            stacklevel=2,
        )
    left_out = sorted(name for name in set_fields if name not in MAPPED and name not in REFUSED)
    if left_out:
        warnings.warn(
            f"Of TrainingArguments {', '.join(left_out)} will have no effect: each step is logged in metrics.csv, "
            "checkpoints are written as often as it takes to lose little, and data is loaded as it is given.",
            stacklevel=2,
        )
    return {**named, **options}


def _set(arguments: Any) -> Iterable[str]:
    """Return the fields that are not at their defaults; those that transformers itself fills in count as default."""
    filled = type(arguments)(output_dir=arguments.output_dir) if _is_real(arguments) else None
    for each in dataclasses.fields(arguments):
        value = getattr(arguments, each.name)
        if filled is not None and each.name != "output_dir":
            default = getattr(filled, each.name)
        elif each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        else:
            default = each.default
        if value != default:
            yield each.name


def _is_real(arguments: Any) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(arguments).__mro__)


# What is trained on


def _batches(arguments: Any, model: nn.Module, data: Any) -> dict[str, Any]:
    """Return the batch size: what transformers accumulates is one batch here. Batch norms see its parts each by itself,
    as there."""
    parts = arguments.gradient_accumulation_steps
    size = arguments.per_device_train_batch_size * parts
    if isinstance(data, DataLoader):
        if data.batch_size != size:
            raise BadValue(
                f"The DataLoader has batches of {data.batch_size}; per_device_train_batch_size is "
                f"{arguments.per_device_train_batch_size} and gradient_accumulation_steps is {parts}.",
                hint=f"Give it batch_size={size}, or give the data set.",
            )
        return {}
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    return {"batch_size": size, **({"micro_batches": parts} if parts > 1 and norms else {})}


def _steps(arguments: Any, data: Any, batch_size: int | None) -> int:
    """Return the number of updates."""
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    try:
        count = len(data) if batch_size is None else length(data) // batch_size
    except TypeError as error:
        raise BadValue(
            f"num_train_epochs is {arguments.num_train_epochs}; the data does not say how long an epoch is.",
            hint="Set max_steps.",
        ) from error
    if not count:
        raise BadData(f"The data has {length(data)} samples; a batch has {batch_size}.")
    left_over = 0 if batch_size is None else length(data) % batch_size
    if left_over and not arguments.dataloader_drop_last:
        warnings.warn(
            f"The last {left_over} samples of an epoch make no batch of {batch_size} and are left out, as with "
            "dataloader_drop_last=True.",
            stacklevel=3,
        )
    return max(1, math.ceil(float(arguments.num_train_epochs) * count))


# How it is trained


def _updates(arguments: Any) -> dict[str, Any]:
    """Return precision and clipping."""
    if arguments.bf16 and arguments.fp16:
        raise BadValue("TrainingArguments has bf16 and fp16.", hint="Leave one of them out.")
    precision = BF16 if arguments.bf16 else FP16 if arguments.fp16 else FLOAT32
    clipping = {"clip_norm": float(arguments.max_grad_norm)} if arguments.max_grad_norm else {}
    return {"precision": precision, **clipping}


def _optimizer(arguments: Any, model: nn.Module, steps: int) -> tuple[Any, Any]:
    """Return the optimizer, with its groups, and the scheduler, as transformers' Trainer makes them."""
    optim = _text(arguments.optim)
    if optim not in OPTIMIZERS:
        raise BadValue(f"optim is '{optim:.60}'.", hint=f"Use one of {', '.join(OPTIMIZERS)}, or pass optimizer=.")
    try:
        from transformers import Trainer, get_scheduler
    except ImportError as error:
        raise BadValue(
            f"TrainingArguments needs transformers, which cannot be imported here: {error}.",
            hint="pip install transformers accelerate",
        ) from error
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [
        {
            "params": [
                p for name, p in model.named_parameters() if p.requires_grad and (name in decayed) == is_decayed
            ],
            "weight_decay": arguments.weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]
    optimizer = kind([group for group in groups if group["params"]], **settings)
    if _text(arguments.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        raise BadValue(
            f"lr_scheduler_type is '{_text(arguments.lr_scheduler_type)}', which follows a metric.",
            hint='Take "linear", and pass scheduler={"scheduler": ReduceLROnPlateau(optimizer), "monitor": ...}.',
        )
    scheduler = get_scheduler(
        arguments.lr_scheduler_type, optimizer=optimizer, num_warmup_steps=arguments.get_warmup_steps(steps),
        num_training_steps=steps, scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )  # fmt: skip
    return optimizer, scheduler


def _validations(arguments: Any, validate: Any) -> dict[str, Any]:
    """Return when is validated, and on what."""
    strategy = _text(arguments.eval_strategy)
    if strategy == "no":
        return {} if validate is None else {"validate": validate}
    if validate is None:
        raise BadValue(f"eval_strategy is '{strategy}', and there is no held-out data.", hint="Add validate=data_set.")
    if strategy == "epoch":
        return {"validate": validate, "validate_every": "epoch"}
    every = arguments.eval_steps
    if every is None or every < 1:
        raise BadValue(f"eval_steps is {every!r}; it must be a number of steps here.", hint="Set eval_steps=100, say.")
    return {"validate": validate, "validate_every": int(every)}


def _callbacks(arguments: Any) -> list[Any]:
    """Return the callbacks that log, and that keep the best weights."""
    from manyhands.training.callbacks import BestCheckpoint, TensorBoard
    from manyhands.training.mlflow_logger import MLflow
    from manyhands.training.wandb_logger import WandB

    kinds: Mapping[str, Any] = {"TensorBoard": TensorBoard, "WandB": WandB, "MLflow": MLflow}
    reported = arguments.report_to or []
    reported = [reported] if isinstance(reported, str) else list(reported)
    unknown = [name for name in reported if name not in LOGGERS and name not in ("none", "all")]
    if unknown:
        raise BadValue(
            f"report_to has '{unknown[0]:.60}'.", hint=f"Use {', '.join(LOGGERS)} or none, or write an mh.Callback."
        )
    made = [kinds[LOGGERS[name]]() for name in reported if name in LOGGERS]
    if arguments.load_best_model_at_end:
        metric = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
        mode = "max" if arguments.greater_is_better else "min"
        made.append(BestCheckpoint(metric, mode=mode))
    return made


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
