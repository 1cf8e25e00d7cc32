"""Models distributed over processes: sums that every process agrees on, or a refusal.

``DistributedDataParallel`` and ``fully_shard`` reduce gradients while autograd accumulates them. A
recording accumulates none, so ``tape.set_grad`` reduces instead: it writes the sum over processes
of what each of them passes, without a division by their number.
"""

from __future__ import annotations

from .processes import Processes, find_processes
from .reduction import Reduction, is_distributed, is_freed

__all__ = ["Processes", "Reduction", "find_processes", "is_distributed", "is_freed"]
