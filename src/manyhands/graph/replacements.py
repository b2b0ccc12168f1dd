"""Suggests what to write in place of an operator that manyhands does not run, for the refusal's hint."""

from __future__ import annotations

from manyhands.graph import ops

SAME = {
    "addmv": "x + torch.matmul(y, z)",
    "cdist": "torch.sqrt((x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1))",
    "median": "torch.sort(x, dim=1)[0][:, (x.shape[1] - 1) // 2]",
    "tensordot": "torch.matmul(x, y)",
}
"""Operator -> code that gives the same, and runs; x, y and z stand for its tensors, n and k its numbers, 1 its axis."""

_DRAWN = "torch.rand_like(x), torch.randn_like(x) or dropout: random numbers are drawn sample by sample"
_BY_VALUE = "torch.where(mask, x, y), or x * mask: shapes may not depend on values"
_WRITTEN = "torch.where(mask, value, x): what was computed is not written to in place"
OTHERS = {
    **dict.fromkeys(("randint", "normal", "multinomial", "rrelu", "randperm", "poisson"), _DRAWN),
    **dict.fromkeys(("nonzero", "masked_select", "_unique2", "unique_dim", "bincount"), _BY_VALUE),
    **dict.fromkeys(("index_fill", "index_copy", "masked_scatter"), _WRITTEN),
    "embedding_bag": "F.embedding(x, table).mean(1)",
    "index_add": "x.scatter_add(1, index, y), with an index for every element",
    "max_pool2d_with_indices": "F.max_pool2d(x, 2), without return_indices",
}  # fmt: skip
"""Operator -> a substitute that may do in its place."""


def advice(target: str) -> str:
    """Return what a user can do about an operator that is not run."""
    name = target.split(".")[1]
    name = name.rstrip("_") if not name.startswith("__") else name
    forms = sorted(form.removeprefix("aten.") for form in ops.ALLOWED if form.split(".")[1] == name)
    if name in SAME:
        text = f"Write {SAME[name]}, which gives the same."
    elif name in OTHERS:
        text = f"Write {OTHERS[name]}."
    elif forms:
        text = f"Other forms of it do run: {', '.join(forms)}."
    else:
        text = "Write it with other operators of torch."
    return (
        f"{text} What depends on the data alone can be computed by the data set. If nothing helps, report this message."
    )
