"""Models spread over processes: sums that every process agrees on, or a refusal.

``DistributedDataParallel`` and ``fully_shard`` reduce gradients while autograd accumulates them. A
recording accumulates none, so ``tape.set_grad`` reduces instead: it writes the sum over processes
of what each of them passes, without a division by their number.
"""

from __future__ import annotations

from .places import freed, is_distributed
from .reduction import Reduction
from .spread import Spread, spread

__all__ = ["Reduction", "Spread", "freed", "is_distributed", "spread"]
