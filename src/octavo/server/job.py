"""A request, ready for the engine."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.core.ids import TokenId
from octavo.core.request import DEFAULT_RETENTION, Retention
from octavo.core.sampling import SamplingParams
from octavo.server.protocol.validation import StrictModel
from octavo.server.tools.output import PLAIN, OutputFormat

Body = TypeVar("Body", bound=StrictModel, covariant=True)


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready for the engine."""

    token_ids: tuple[TokenId, ...]
    text: str
    """As the client wrote it, or the text of its token ids."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Job(Generic[Body]):
    """A request, ready for the engine."""

    request: Body
    model: str
    """The served name that the client used."""
    prompts: tuple[PreparedPrompt, ...]
    n: int = 1
    """Completions of each prompt."""
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""
    retention: Retention = DEFAULT_RETENTION
    output: OutputFormat = PLAIN
    """What there is to find in the answers."""

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.prompts) * self.n
