"""Upper limits on sizes in a checkpoint."""

from __future__ import annotations

# Far above any published model in the supported families. A larger size means damage or an attack, and would only lead
# to an impossible allocation.
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_WINDOW = 1 << 62
MAX_SCALE = 1e6
MAX_SOFT_CAP = 1e6
MAX_POSITION = 1 << 27
MAX_CONV_LENGTH = 64
MAX_EXPERTS = 4096
MAX_ALL_EXPERTS = 1 << 16  # over all layers

SIZE_MULTIPLE = 16  # kernels read rows in vectors of 16
