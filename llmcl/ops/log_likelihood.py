"""log_likelihood and kl_divergence: evaluation metrics, computed on the device from the logits."""

from __future__ import annotations

from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def log_likelihood(device: Device, vocab_size: int, logits: Buffer, targets: Buffer, out: Buffer) -> Launch:
    """Computes the natural logarithm of each target's probability. Enqueue the launch with n.

    logits float32 [n, vocab], targets int32 [n], within the vocabulary, out float32 [n].
    """
    return _bind(device, "log_likelihood", vocab_size, [logits, targets, out])


def kl_divergence(device: Device, vocab_size: int, reference: Buffer, logits: Buffer, out: Buffer) -> Launch:
    """Computes KL(softmax(reference) || softmax(logits)) in nats, and 1 if both have the same likeliest token,
    otherwise 0.

    reference, logits float32 [n, vocab], out float32 [n, 2]. Enqueue the launch with n.
    """
    return _bind(device, "kl_divergence", vocab_size, [reference, logits, out])


def _bind(device: Device, op: str, vocab_size: int, args: list[Buffer]) -> Launch:
    size = local_size(device, 256)
    constants = {"VOCAB": vocab_size, "LOCAL_SIZE": size}
    (launch,) = op_launches(device, op, constants, args, groups=lambda n_rows: (n_rows,), local=(size,))
    return launch
