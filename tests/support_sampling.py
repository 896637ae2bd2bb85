"""Every sampler that this machine can run, and states for them."""

from collections.abc import Callable, Sequence

from octavo.core.ids import SequenceId, TokenId
from octavo.core.plan import NewSequence
from octavo.core.sampling import SamplingParams
from octavo.kernels.native.loading import is_built
from octavo.kernels.sampling.interface import Sampler, SamplingState
from octavo.kernels.sampling.numpy_sampler import NumpySampler

MakeSampler = Callable[[int], Sampler]
"""Makes a sampler for a vocabulary size."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def new_sequence(
    sequence_id: int = 0,
    prompt: Sequence[TokenId] = (1, 2, 3),
    sampling: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    output: Sequence[TokenId] = (),
    ending: Sequence[TokenId] = (),
) -> NewSequence:
    """Return a ``NewSequence`` with defaults."""
    return NewSequence(
        SequenceId(sequence_id), tuple(prompt), tuple(output), sampling, seed, frozenset(ending)
    )


def sampling_state(
    sampler: Sampler,
    sampling: SamplingParams = GREEDY,
    *,
    seed: int = 0,
    prompt: Sequence[TokenId] = (0,),
    output: Sequence[TokenId] = (),
    ending: Sequence[TokenId] = (),
) -> SamplingState:
    """Return what a sampler knows of one sequence."""
    return sampler.state(new_sequence(0, prompt, sampling, seed=seed, output=output, ending=ending))


def sampler_names() -> list[str]:
    """Return ``numpy`` and the instruction sets for which this machine has a native sampler."""
    if not is_built():
        return ["numpy"]
    from support_native import ISAS

    return ["numpy", *ISAS]


def sampler_maker(name: str) -> MakeSampler:
    """Return what makes the sampler of this name."""
    if name == "numpy":
        return NumpySampler
    from support_native import backend_of

    return backend_of(name).sampler
