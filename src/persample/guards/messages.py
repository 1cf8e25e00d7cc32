"""What is said where backward brings something that cannot be answered for."""

from __future__ import annotations

from ..errors import MissedUseError, Place, StaleError, UsageError, describe
from ..uses import Use


def parameter_changed(which: str) -> StaleError:
    """A parameter is not what it was."""
    return StaleError(
        f"{which} was modified after it was recorded",
        why="this answer is computed from its values when it is asked for",
        fix="ask the tape before optimizer.step(), load_state_dict(...) or another write",
    )


def saved_data_changed(use: Use) -> MissedUseError:
    """Saved data came back as other data."""
    return MissedUseError(
        f"what {use.operator} saved in forward is not what came back in backward",
        where=describe(use.place),
        why="saved-tensor hooks, or a recomputation that the recorder could not follow",
        fix="use checkpoint(..., use_reentrant=False), or no hooks that change what they save",
    )


def gone(use: Use) -> UsageError:
    """The memory of a sharded parameter was freed."""
    return UsageError(
        f"{use.operator} used a tensor computed from parameters of another sharded module",
        where=describe(use.place),
        why="fully_shard has freed their memory when its gradient arrives",
        fix="compute it in the module that uses it, or shard both as one group",
    )


def slot_exchanged(place: Place | None, name: str) -> UsageError:
    """A parameter's slot held two tensors."""
    return UsageError(
        f"two tensors were used as the parameter {name!r}",
        where=describe(place),
        why="torch.func.functional_call, or an assignment, exchanged it between two uses",
        fix="record them one at a time; tensors computed from parameters inside the block are "
        "followed",
    )


def hook_on_expanded(use: Use) -> UsageError:
    """Code of the user's own would see gradients that were added up already."""
    return UsageError(
        f"{use.operator} used an expanded tensor with a hook, or made by a custom function",
        where=describe(use.place),
        why="its gradients are added up over the expanded axis, and were not kept separate",
        fix="expand after the custom function, and put hooks on the tensor before it is expanded",
    )


def gradient_of_unowned_rows(use: Use) -> MissedUseError:
    """A gradient reached rows of no sample."""
    return MissedUseError(
        f"a parameter used by {use.operator} reached the loss through rows of no sample",
        where=describe(use.place),
        why="constant rows share an axis with the samples' rows, and nothing says whose they are",
        fix="tape.backward(losses) with one loss per sample, in their order; tape.mark(tensor, "
        "ids=...) says which sample they belong to; or join constants along another axis",
    )


def not_finite_at_zeros(operator: str, place: Place | None) -> MissedUseError:
    """A gradient is not finite where zeros keep samples separate."""
    return MissedUseError(
        f"the gradient that reached {operator} is not finite",
        where=describe(place),
        why="zeros of a matrix or a mask separate the samples, and zero times that is not zero",
        fix="leave out the samples whose losses overflow",
    )


def zeros_overwritten() -> StaleError:
    """A constant that kept samples separate in forward does not in backward."""
    return StaleError(
        "a matrix or a mask whose zeros keep the samples separate was written to before backward",
        why="backward reads it again, and gives samples gradients of others",
        fix="write to a clone of it",
    )


def remade() -> StaleError:
    """A tensor derived from parameters could not be made again."""
    return StaleError(
        "what is derived from parameters alone was written to unseen before it was used with data",
        why="it, or a constant behind it: made again for every sample, it came out another",
        fix="write to a clone of it",
    )


def kept_data_overwritten(use: Use) -> StaleError:
    """Somebody wrote into what a tape keeps."""
    return StaleError(
        f"data recorded for {use.operator} were overwritten in place",
        where=describe(use.place),
        fix="ask the tape before activations, gradients or input buffers are reused",
    )
