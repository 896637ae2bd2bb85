"""What one step may still spend: made for the step, thrown away with it."""

from octavo.core.errors import InvariantError


class TokenBudget:
    """Tokens that the step may still compute."""

    __slots__ = ("_total", "left")

    def __init__(self, total: int) -> None:
        self._total = total
        self.left = total

    def spend(self, num_tokens: int) -> None:
        """Take from what is left.

        Raises:
            InvariantError: there is not so much, or nothing is asked for.
        """
        if not 0 < num_tokens <= self.left:
            raise InvariantError(f"{num_tokens} tokens asked of a budget of {self.left}")
        self.left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """Give back what was spent.

        Raises:
            InvariantError: more comes back than was spent.
        """
        if self.left + num_tokens > self._total:
            raise InvariantError(f"{num_tokens} tokens refunded to a budget of {self.left}")
        self.left += num_tokens
