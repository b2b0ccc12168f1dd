"""The effect of every operator on channels: names of functions and methods, and kinds of layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import activation, dropout, padding, pooling, upsampling


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Every output channel is made of the same channel of the input, in the same way for all channels.
_LOCAL = """
relu relu_ relu6 leaky_relu leaky_relu_ sigmoid sigmoid_ logsigmoid tanh tanh_ silu mish hardswish hardsigmoid hardtanh
hardtanh_ gelu elu elu_ selu selu_ celu softplus softsign softshrink hardshrink tanhshrink threshold rrelu dropout
dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout clamp clamp_ clip clamp_min clamp_max
abs exp log sqrt rsqrt neg pow square positive nan_to_num contiguous clone detach float double half bfloat16 to type
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate
upsample upsample_nearest upsample_bilinear
"""
# Two tensors, element by element.
_JOINING = """
add add_ iadd radd sub sub_ isub rsub mul mul_ imul rmul multiply div div_ truediv itruediv true_divide maximum minimum
"""
LOCAL, JOINING = _names(_LOCAL), _names(_JOINING)
RESHAPING = _names("view reshape flatten squeeze unsqueeze unflatten")
REDUCING = _names("mean sum amax amin")
CONCATENATING = _names("cat concat concatenate")
SOFTMAX = _names("softmax log_softmax softmin")
# Operators that say something about a tensor, or check it, without making another.
ASIDE = _names("size dim getattr numel _assert is_floating_point eq ne lt gt le ge")

_ALONG_CHANNELS = (activation.Softmax, activation.LogSoftmax, activation.Softmin)
_MIXING = (activation.MultiheadAttention, activation.GLU, activation.Softmax2d)
_LOCAL_HOMES = tuple(module.__name__ for module in (activation, dropout, padding, pooling, upsampling))


def is_local(module: nn.Module) -> bool:
    """Return whether a layer is one of PyTorch's that works on each channel alone, without weights."""
    if isinstance(module, nn.Identity):
        return True
    if isinstance(module, (*_ALONG_CHANNELS, *_MIXING, nn.PReLU)) or getattr(module, "return_indices", False):
        return False
    unpools = isinstance(module, (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d))
    return not unpools and type(module).forward.__module__ in _LOCAL_HOMES


def is_softmax(module: nn.Module) -> bool:
    return isinstance(module, _ALONG_CHANNELS)


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)
