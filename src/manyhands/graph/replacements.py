"""Suggests what to write in place of an operator that manyhands does not run, for the refusal's hint."""

from __future__ import annotations

from manyhands.graph import ops

SAME = {
    "acosh": "torch.log(x + torch.sqrt(x * x - 1))",
    "adaptive_max_pool1d": "F.adaptive_max_pool2d(x.unsqueeze(2), (1, n)).squeeze(2)",
    "addmv": "x + torch.matmul(y, z)",
    "aminmax": "(x.amin(1), x.amax(1))",
    "asinh": "torch.log(x + torch.sqrt(x * x + 1))",
    "atanh": "torch.log((1 + x) / (1 - x)) / 2",
    "cdist": "torch.sqrt((x.unsqueeze(2) - y.unsqueeze(1)).square().sum(-1))",
    "cosh": "(torch.exp(x) + torch.exp(-x)) / 2",
    "count_nonzero": "(x != 0).sum(1)",
    "diagonal": "(x * torch.eye(x.shape[-1])).sum(-1)",
    "diff": "x[:, 1:] - x[:, :-1]",
    "erfc": "1 - torch.erf(x)",
    "exp2": "torch.exp(x * math.log(2))",
    "fmax": "torch.maximum(x, y)",
    "fmin": "torch.minimum(x, y)",
    "frac": "x - torch.sign(x) * torch.floor(torch.abs(x))",
    "glu": "x.chunk(2, -1)[0] * torch.sigmoid(x.chunk(2, -1)[1])",
    "hypot": "torch.sqrt(x * x + y * y)",
    "isnan": "x != x",
    "kthvalue": "torch.topk(x, k, dim=1, largest=False)[0][:, -1]",
    "log10": "torch.log(x) / math.log(10)",
    "logaddexp": "torch.logsumexp(torch.stack([x, y], -1), -1)",
    "logit": "torch.log(x / (1 - x))",
    "median": "torch.sort(x, dim=1)[0][:, (x.shape[1] - 1) // 2]",
    "remainder": "x - y * torch.floor(x / y)",
    "sgn": "torch.sign(x)",
    "sinh": "(torch.exp(x) - torch.exp(-x)) / 2",
    "std_mean": "(x.std(1), x.mean(1))",
    "tensordot": "torch.matmul(x, y)",
    "trunc": "torch.sign(x) * torch.floor(torch.abs(x))",
    "upsample_linear1d": "F.interpolate(x.unsqueeze(2), size=(1, n), mode='bilinear').squeeze(2)",
    "var_mean": "(x.var(1), x.mean(1))",
}
"""Operator -> code that gives the same, and runs; x, y and z stand for its tensors, n and k its numbers, 1 its axis."""

_DRAWN = "torch.rand_like(x), torch.randn_like(x) or dropout: random numbers are drawn sample by sample"
_BY_VALUE = "torch.where(mask, x, y), or x * mask: shapes may not depend on values"
_WRITTEN = "torch.where(mask, value, x): what was computed is not written to in place"
_SAMPLED = "F.interpolate with mode 'nearest' or 'bilinear', of pictures"
OTHERS = {
    **dict.fromkeys(("rand", "randn", "randint", "normal", "multinomial", "rrelu", "randperm", "poisson"), _DRAWN),
    **dict.fromkeys(("nonzero", "masked_select", "_unique2", "unique_dim", "bincount"), _BY_VALUE),
    **dict.fromkeys(("fill", "index_put", "index_fill", "index_copy", "masked_scatter", "copy"), _WRITTEN),
    **dict.fromkeys(("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact2d"), _SAMPLED),
    "embedding_bag": "F.embedding(x, table).mean(1)",
    "im2col": "a convolution (nn.Conv2d), or slices of x",
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
